"""Whether a network of ``torch.export`` keeps anything from one batch to the next.

Its results would then depend on which patches it had seen before, and so on the order of the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from beam_inference.errors import ModelContractError
from beam_inference.models.batch_norm import exported_batch_norm
from beam_inference.models.exported_calls import list_graphs


def check_stateless(program: Any, path: str) -> None:
    """Refuse a program that writes to its own tensors, or to its input, and reads what it wrote.

    The running statistics of BatchNorm in training are written and not read: they are let through.

    Args:
        program: a ``torch.export.ExportedProgram``.
        path: of its file, for the message.

    Raises:
        ModelContractError: it does.
    """
    signature = program.graph_signature
    changed = {*signature.user_inputs_to_mutate.values()}
    own = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    own |= {*signature.inputs_to_lifted_tensor_constants}
    targets = {
        *signature.buffers_to_mutate.values(),
        *getattr(signature, "parameters_to_mutate", {}).values(),
    }
    written = _nodes_written_to(program.graph)
    for graph in list_graphs(program.graph_module):
        is_part = graph is not program.graph
        if is_part and any(node.op == "placeholder" for node in _nodes_written_to(graph)):
            changed.add("what a branch or a loop of it is given")
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in own:
            continue
        name = signature.inputs_to_buffers.get(node.name) or signature.inputs_to_parameters.get(
            node.name, node.name
        )
        is_written = node in written or name in targets
        if is_written and not all(_is_unread(user, signature) for user in node.users):
            changed.add(name)
    if changed:
        raise ModelContractError(
            f"the torch.export file {path} changes {', '.join(sorted(changed))[:300]} with every "
            "batch: its results would depend on the order in which patches are computed. Export "
            "the network without state that it changes."
        )


def _nodes_written_to(graph: Any) -> set[Any]:
    """The nodes to whose tensors a program writes in place, also by views of them."""
    return {
        source
        for node in graph.nodes
        for argument, is_written in _aliases(node)
        if is_written
        for source in _sources(argument)
    }


def _sources(node: Any) -> Iterator[Any]:
    """A node, and those whose memory its tensor may share."""
    seen = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting.extend(argument for argument, _ in _aliases(current))
            yield current


def _aliases(node: Any) -> Iterator[tuple[Any, bool]]:
    """The inputs of a node of which its operator returns views; and whether it writes to them."""
    if node.op != "call_function":
        return
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a function of Python, such as that which takes an item of a list
        yield from ((each, False) for each in node.all_input_nodes)
        return
    for number, argument in enumerate(schema.arguments):
        given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None:
            for each in given if isinstance(given, list | tuple) else [given]:
                if hasattr(each, "users"):
                    yield each, argument.alias_info.is_write


def _is_unread(user: Any, signature: Any) -> bool:
    """Whether what a node makes of a tensor does not reach the network's result."""
    if exported_batch_norm(user) == "batch":
        return True
    is_result = user.op == "output" or user.name in signature.user_outputs
    return not is_result and all(each.op == "output" for each in user.users)
