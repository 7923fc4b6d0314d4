"""The flows that come with the package, one a file; `template.py` is for a new one."""
