"""Formats every Bazel file of the workspace: ./bazelw run //tools/lint:fix_build_files

Not the stand-ins of air-gapped mode: buildifier would make them load the rules they stand in for.
"""

import os
import pathlib
import subprocess
import sys

(PROGRAM,) = pathlib.Path("..").glob("*buildifier*/buildifier")
STAND_INS = (":!tools/airgap/rules_*", ":!tools/airgap/remote_coverage_tools")

if __name__ == "__main__":
    workspace = os.environ["BUILD_WORKSPACE_DIRECTORY"]
    listed = subprocess.run(
        ["git", "ls-files", "--", "*.bazel", "*.bzl", "*.bzlmod", "WORKSPACE", *STAND_INS],
        cwd=workspace,
        capture_output=True,
        text=True,
        check=True,
    )
    command = [PROGRAM.resolve(), "-mode=fix", "-lint=fix", *listed.stdout.split()]
    sys.exit(subprocess.run(command, cwd=workspace).returncode)
