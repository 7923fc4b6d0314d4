"""Wheels: what a package's own library target runs with is what its wheel holds.

    sa_wheel(name = "core_wheel", package = "//core")

builds the folder `core_wheel` with one wheel. The files are those that `//core:core` carries below
`core/stream_attention/`: Python sources, data, and shared libraries; nothing is listed twice. The rest
of the wheel comes from the package's `pyproject.toml`, which `pip install -e` reads too.
"""

_NAMESPACE = "/stream_attention/"

def _own_files(target):
    """The files of a library target that lie in its own package's part of the namespace."""
    prefix = target.label.package + _NAMESPACE
    info = target[DefaultInfo]
    sets = [info.files, info.default_runfiles.files, info.data_runfiles.files]
    files = depset(transitive = sets).to_list()
    return {file.short_path: file for file in files if file.short_path.startswith(prefix)}

def _only(files, path):
    """The one file of `files` with this path in the workspace."""
    found = [file for file in files if file.short_path == path]
    if len(found) != 1:
        fail("%s: must be among the sources; found %d of that path" % (path, len(found)))
    return found[0]

def _sa_wheel_impl(ctx):
    files = {}
    folder = ctx.attr.folder
    if ctx.attr.package:
        files.update(_own_files(ctx.attr.package))
        if not files:
            fail("%s has no file below %s%s" % (ctx.attr.package.label, folder, _NAMESPACE))
    pyproject = folder + "/pyproject.toml"
    files[pyproject] = _only(ctx.files.sources, pyproject)
    version = "core/stream_attention/core/version.py"
    files[version] = _only(ctx.files.version_sources, version)
    for hook in ctx.files.hooks:
        files[hook.short_path] = hook
    for name in ["LICENSE", "README.md"] if ctx.attr.readme else ["LICENSE"]:
        files[folder + "/" + name] = _only(ctx.files.root_sources, name)

    manifest = ctx.actions.declare_file(ctx.label.name + ".manifest.json")
    ctx.actions.write(manifest, json.encode({
        "files": {path: file.path for path, file in files.items()},
        "project": folder,
    }))
    out = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run(
        executable = ctx.executable._builder,
        arguments = [manifest.path, out.path],
        inputs = depset([manifest] + files.values()),
        outputs = [out],
        mnemonic = "SaWheel",
        progress_message = "Building the wheel of %s" % folder,
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

_sa_wheel = rule(
    implementation = _sa_wheel_impl,
    attrs = {
        "folder": attr.string(mandatory = True),
        "hooks": attr.label_list(allow_files = [".py"]),
        "package": attr.label(),
        "readme": attr.bool(),
        "root_sources": attr.label(allow_files = True),
        "sources": attr.label(allow_files = True),
        "version_sources": attr.label(allow_files = True),
        "_builder": attr.label(default = "//tools/wheels:build_wheel", executable = True, cfg = "exec"),
    },
)

def sa_wheel(name, package = None, folder = None, sources = None, readme = False):
    """Builds one wheel into the folder `name`.

    Args:
      name: the target and the output folder.
      package: the package's library, e.g. "//core"; without it the wheel is metadata only.
      folder: where pyproject.toml lies, from the root; default: the package's folder.
      sources: the target that has pyproject.toml; default: the package's `:sources`.
      readme: the root's README.md is the long description.
    """
    _sa_wheel(
        name = name,
        package = package,
        folder = folder or package[len("//"):],
        hooks = [
            "//tools/wheels:hatch_metadata.py",
            "//tools/wheels:hatch_native.py",
        ],
        readme = readme,
        root_sources = "//:sources",
        sources = sources or package + ":sources",
        version_sources = "//core:sources",
    )

def _sa_wheelhouse_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    args = ctx.actions.args()
    args.add(out.path)
    args.add_all(ctx.files.wheels, expand_directories = False)
    ctx.actions.run_shell(
        command = 'out=$1; shift; for folder in "$@"; do cp -L "$folder"/*.whl "$out"; done; chmod 0644 "$out"/*',
        arguments = [args],
        inputs = ctx.files.wheels,
        outputs = [out],
        mnemonic = "SaWheelhouse",
        progress_message = "Collecting the wheels",
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

sa_wheelhouse = rule(
    implementation = _sa_wheelhouse_impl,
    attrs = {"wheels": attr.label_list(allow_files = True)},
    doc = "Collects wheels in one folder, to which pip's --find-links can point.",
)
