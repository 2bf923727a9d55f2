"""The cache of compiled programs on disk: its folder, and which programs are kept."""

import jax
import pytest

from perfedrl.compilation import MIN_COMPILE_TIME, enable_cache

FOLDER, TIME = "jax_compilation_cache_dir", MIN_COMPILE_TIME.lower()


@pytest.fixture(autouse=True)
def restored_settings():
    before = {name: jax.config.values[name] for name in (FOLDER, TIME)}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_folder_of_the_users_keeps_short_programs_too(monkeypatch, tmp_path):
    monkeypatch.delenv(MIN_COMPILE_TIME, raising=False)
    jax.config.update(FOLDER, str(tmp_path))
    jax.config.update(TIME, 1.0)
    assert enable_cache() == tmp_path
    assert jax.config.values[TIME] == 0.1


def test_the_users_least_compile_time_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv(MIN_COMPILE_TIME, "3")
    jax.config.update(FOLDER, str(tmp_path))
    jax.config.update(TIME, 3.0)
    enable_cache()
    assert jax.config.values[TIME] == 3.0
