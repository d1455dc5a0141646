"""What users bring: files and packages of networks, fetched, read and checked."""
