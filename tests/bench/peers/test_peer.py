"""Missing packages are named with the command that installs them."""

from __future__ import annotations

from bench.peers.peer import install_command


def test_a_requirement_of_several_modules_is_installed_once() -> None:
    packages = {"json": "json", "no_such_module": "'a[b]'", "no_such_other": "'a[b]'", "no_third": "c"}
    assert install_command(packages) == "pip install 'a[b]' c"
    assert install_command({"json": "json"}) is None
