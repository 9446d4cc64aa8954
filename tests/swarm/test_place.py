"""Contracts of the journal's place: a file or a server, and no password where others can read it."""

import pytest

from perilune.swarm.journal.event import JournalError
from perilune.swarm.place import JOURNAL, JournalPlace


@pytest.mark.parametrize(
    "address",
    ["postgresql://user:secret@host/db", "postgres://host/db?password=secret", "postgresql://:secret@/db?host=/tmp"],
)
def test_a_password_in_the_address_is_refused_and_not_shown(tmp_path, address):
    with pytest.raises(JournalError, match="PGPASSWORD") as error:
        JournalPlace(folder=tmp_path, address=address)
    assert "secret" not in str(error.value)


def test_another_kind_of_server_is_refused(tmp_path):
    with pytest.raises(JournalError, match="mysql"):
        JournalPlace(folder=tmp_path, address="mysql://host/db")


def test_a_file_is_there_or_not(tmp_path):
    place = JournalPlace(folder=tmp_path)
    assert not place.exists()
    (tmp_path / JOURNAL).touch()
    assert place.exists() and place.opener(b"", heads=tmp_path, elsewhere=False) is None
