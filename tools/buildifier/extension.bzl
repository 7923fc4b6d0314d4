"""The module extension of registry mode that makes `@buildifier`. Bazel 4 does not know such a thing."""

load(":repo.bzl", "buildifier_repository")

def _buildifier_extension_impl(_module_ctx):
    buildifier_repository(name = "buildifier")

buildifier_extension = module_extension(
    implementation = _buildifier_extension_impl,
)
