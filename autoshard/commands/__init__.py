"""The subcommands of `autoshard`, one file each: `run(arguments) -> exit code`."""
