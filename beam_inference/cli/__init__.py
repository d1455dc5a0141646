"""The command line: one module per group of commands, with arguments and actions together."""
