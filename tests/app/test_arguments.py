"""Who is let in, and what is said where something that was asked for cannot be had."""

from argparse import Namespace

import pytest

from app.settings import read_arguments, unguarded, unmet


def test_it_listens_on_this_machine_only_and_shares_nothing_unless_asked() -> None:
    chosen = read_arguments([])
    assert (chosen.host, chosen.share, chosen.public, chosen.auth, chosen.mcp) == (
        "127.0.0.1",
        False,
        False,
        None,
        False,
    )


def test_an_address_anyone_may_open_is_public() -> None:
    assert read_arguments(["--share"]).public
    assert not read_arguments(["--share", "--auth", "me:secret"]).public


def test_tools_without_their_package_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.settings.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        read_arguments(["--mcp"])
    assert capsys.readouterr().err == "--mcp needs one more package: pip install 'gradio[mcp]'\n"


def test_what_was_asked_for_and_could_not_be_had_is_said() -> None:
    asked = Namespace(share=True, mcp=True)
    assert list(unmet(asked, "https://x.gradio.live", None)) == []
    share, tools = unmet(asked, None, "Error launching MCP server: no module\nmore")
    assert share.startswith("No public address")
    assert "no module. Reinstall" in tools


def test_what_it_means_to_be_reached_by_others_is_said() -> None:
    open_to_all = unguarded(read_arguments(["--host", "0.0.0.0"]))
    assert open_to_all and "--auth" in open_to_all and "\n" not in open_to_all
    assert unguarded(read_arguments([])) is None
    assert unguarded(read_arguments(["--host", "0.0.0.0", "--public"])) is None
    assert unguarded(read_arguments(["--host", "0.0.0.0", "--auth", "me:secret"])) is None


def test_a_server_that_is_none_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_arguments(["--server", "ftp://x"])
    assert "is not the address of a server" in capsys.readouterr().err
