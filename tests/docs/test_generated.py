"""The generated files are up to date."""

from tests.docs.generated import API, DEFAULT_YAML, ROOFLINE, SETTINGS, api, default_yaml, roofline, settings


def test_the_default_settings_are_up_to_date() -> None:
    assert DEFAULT_YAML.read_text() == default_yaml(), "run python -m tests.docs.generated"


def test_the_tables_of_settings_are_up_to_date() -> None:
    page = SETTINGS.read_text()
    assert page == settings(page), "run python -m tests.docs.generated"


def test_the_tables_of_unsupported_fields_are_up_to_date() -> None:
    page = API.read_text()
    assert page == api(page), "run python -m tests.docs.generated"


def test_the_table_of_the_roofline_is_up_to_date() -> None:
    page = ROOFLINE.read_text()
    assert page == roofline(page), "run python -m tests.docs.generated"
