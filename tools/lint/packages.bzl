"""Every Bazel package of the tree. A lint test fails for one that is missing here."""

PACKAGES = [
    "",
    "bench",
    "core",
    "core/csrc",
    "flows",
    "kernels_sm100",
    "kernels_sm80",
    "kernels_sm90",
    "planner",
    "policies",
    "tools",
    "tools/airgap",
    "tools/buildifier",
    "tools/ci",
    "tools/cuda",
    "tools/docs",
    "tools/gpu_host",
    "tools/lint",
    "tools/lint/graph",
    "tools/python",
    "tools/visibility",
    "tools/wheels",
]

# Its tests depend on `:targets` and `:closure` of the others, so its own would wait for themselves.
_GRAPH = "tools/lint/graph"

def all_packages(target):
    """Returns the labels of `target` in every package."""
    return ["//%s:%s" % (p, target) for p in PACKAGES if p != _GRAPH or target == "sources"]
