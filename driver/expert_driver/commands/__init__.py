"""The subcommands of `expert-net`, one module each; `command` is what cli.py loads."""
