#!/bin/sh
echo "coverage: not available in air-gapped mode; use 'bazelw test'" >&2
exit 1
