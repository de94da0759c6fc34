"""The local engine: a base process, forked copy-on-write into one process per copy."""
