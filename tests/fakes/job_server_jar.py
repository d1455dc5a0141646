"""A jar that says of itself what a job server's does, and holds nothing that could run."""

from __future__ import annotations

import zipfile
from pathlib import Path

_FLINK = "org.apache.beam.runners.flink.FlinkJobServerDriver"


def write_jar(path: Path, main_class: str = _FLINK, java: int = 17, beam: str = "2.77.0") -> Path:
    """Write a jar for Flink 1.19.

    Args:
        path: of the file.
        main_class: that its manifest names.
        java: version of Java that the class needs.
        beam: version of Beam.
    """
    with zipfile.ZipFile(path, "w") as jar:
        manifest = f"Manifest-Version: 1.0\r\nMain-Class: {main_class}\r\n"
        jar.writestr("META-INF/MANIFEST.MF", manifest)
        head = b"\xca\xfe\xba\xbe\0\0\0" + bytes([44 + java])
        jar.writestr(main_class.replace(".", "/") + ".class", head)
        jar.writestr("org/apache/beam/sdk/sdk.properties", f"version={beam}\nsdk_version={beam}\n")
        jar.writestr("META-INF/maven/org.apache.beam/beam-runners-flink-1.19/pom.properties", "")
    return path
