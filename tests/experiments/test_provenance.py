"""The provenance of a run."""

import importlib.metadata

from perfedrl.experiments import provenance


def test_a_folder_with_the_name_of_an_optional_package_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "folder_for_test").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(provenance, "OPTIONAL", ("folder_for_test", "numpy"))
    about = provenance.provenance(1.0)
    assert about["numpy"] == importlib.metadata.version("numpy")
    assert "folder_for_test" not in about
