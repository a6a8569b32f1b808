#!/usr/bin/env bash
# Builds dist/outrider_VERSION_ARCHITECTURE.deb from the wheel for this machine, with debhelper. Its maintainer is who builds it
# (DEBFULLNAME and DEBEMAIL, as for Debian's own tools), or else the author of the last commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DEB_SOURCE=$PWD
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
maintainer="${DEBFULLNAME:-$(git log -1 --format=%an)} <${DEBEMAIL:-$(git log -1 --format=%ae)}>"
build=build/deb/outrider-$version

rm -rf build/deb
mkdir -p "$build"
cp -r release/debian "$build"
sed -i "1a Maintainer: $maintainer" "$build/debian/control"
cp docker/outrider.service "$build/debian/outrider.service"
cat > "$build/debian/changelog" <<EOF
outrider ($version) unstable; urgency=medium

  * CHANGELOG.md of the sources has the changes.

 -- $maintainer  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
EOF
(cd "$build" && dpkg-buildpackage --build=binary --unsigned-changes --no-check-builddeps)
mv build/deb/*.deb dist
(cd dist && sha256sum ./*.deb | sed 's|\./||' >> SHA256SUMS)
