"""The native py_runtime under the public rules_python's name."""

_MIGRATION_TAG = "__PYTHON_RULES_MIGRATION_DO_NOT_USE_WILL_BREAK__"

def py_runtime(**attrs):
    tags = attrs.pop("tags", None) or []
    native.py_runtime(tags = tags + [_MIGRATION_TAG], **attrs)
