"""The repository `@buildifier`: the formatter and linter of Bazel files, from its npm package.

The package holds the program itself for each platform; no package on pip's side does. npm only
downloads one file here, whose hash is checked, so it does not matter which npm that is: the one on PATH,
else the one in the wheel that npm.lock names.
"""

_VERSION = "8.2.1"

_SHA256 = "b96ea9b13003036c801f52bee6f9b0314738f8432e5cb9d814c89f59292604ee"

_PROGRAMS = {
    "Linux aarch64": "buildifier-linux_arm64",
    "Linux x86_64": "buildifier-linux_amd64",
}

_CANDIDATES = ["python3", "python3.11", "python3.12", "python3.13", "python3.10", "/usr/bin/python3"]

def _npm_from_wheel(ctx):
    """Returns the command of an npm that a hash-locked wheel brings."""
    asked = ctx.os.environ.get("STREAM_ATTENTION_PYTHON", "")
    reasons = []
    for candidate in [asked] if asked else _CANDIDATES:
        path = candidate if candidate.startswith("/") else ctx.which(candidate)
        if not path or not ctx.path(path).exists:
            reasons.append("%s: not found" % candidate)
            continue
        result = ctx.execute([path, "-m", "venv", ctx.path("venv")], timeout = 300)
        if result.return_code:
            reasons.append("%s: %s" % (path, result.stdout + result.stderr))
            continue
        python = ctx.path("venv/bin/python")
        install = [python, "-m", "pip", "install", "--require-hashes", "--no-deps", "--only-binary=:all:"]
        install += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "-r", ctx.path(ctx.attr.lock)]
        result = ctx.execute(install, timeout = 1800)
        if result.return_code:
            fail("buildifier: pip could not install npm:\n%s%s" % (result.stdout, result.stderr))
        return [ctx.path("venv/bin/npm")]
    fail("buildifier: no npm on PATH and no Python that can make a venv to install one; " +
         "install npm, or python3-venv:\n  %s" % "\n  ".join(reasons))

def _buildifier_repository_impl(ctx):
    machine = ctx.execute(["uname", "-sm"]).stdout.strip()
    if machine not in _PROGRAMS:
        fail("machine=%s: buildifier is locked for %s" % (machine, ", ".join(_PROGRAMS)))
    npm = ctx.which("npm")
    command = [npm] if npm else _npm_from_wheel(ctx)
    name = "@bazel/buildifier@" + _VERSION
    path = ctx.os.environ.get("PATH", "")
    result = ctx.execute(
        command + ["pack", name, "--loglevel=error", "--pack-destination", ctx.path(".")],
        environment = {
            # Beside npm from a wheel lies its node.
            "PATH": "%s:%s" % (ctx.path("venv/bin"), path),
            "npm_config_cache": str(ctx.path("cache")),
        },
        timeout = 600,
    )
    archive = ctx.path("bazel-buildifier-%s.tgz" % _VERSION)
    if result.return_code or not archive.exists:
        fail("buildifier: npm could not download %s:\n%s%s" % (name, result.stdout, result.stderr))
    found = ctx.execute(["sha256sum", archive]).stdout.split(" ")[0]
    if found != _SHA256:
        fail("buildifier: sha256 of %s: got %s, expected %s" % (name, found, _SHA256))
    ctx.extract(archive, "", "package")
    ctx.execute(["mv", _PROGRAMS[machine], "buildifier"])
    ctx.execute(["sh", "-c", "chmod a+rx buildifier && rm -rf venv cache *.tgz buildifier-*"])
    ctx.file("BUILD.bazel", 'exports_files(["buildifier"])\n')

buildifier_repository = repository_rule(
    implementation = _buildifier_repository_impl,
    attrs = {
        "lock": attr.label(default = Label("//tools/buildifier:npm.lock"), allow_single_file = True),
    },
    environ = [
        "STREAM_ATTENTION_PYTHON",
    ],
    doc = "The program `@buildifier//:buildifier`, checked against its hash.",
)
