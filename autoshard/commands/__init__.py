"""The subcommands of `autoshard`, one module each with a function `run(arguments) -> exit code`."""
