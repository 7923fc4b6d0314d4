"""The native Python rules under the public rules_python's names."""

# Bazel's own mark for "loaded through rules_python".
_MIGRATION_TAG = "__PYTHON_RULES_MIGRATION_DO_NOT_USE_WILL_BREAK__"

def _tagged(attrs):
    tags = attrs.pop("tags", None) or []
    return dict(attrs, tags = tags + [_MIGRATION_TAG])

def py_library(**attrs):
    native.py_library(**_tagged(attrs))

def py_binary(**attrs):
    native.py_binary(**_tagged(attrs))

def py_test(**attrs):
    native.py_test(**_tagged(attrs))
