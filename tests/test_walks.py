"""What happens in a client enters no more files than CONTRIBUTING's walks say."""

from . import walks


def test_a_walk_enters_no_file_that_is_not_listed() -> None:
    walks.check()


def test_the_files_of_the_walks_exist() -> None:
    listed = walks.read()
    assert list(listed) == list(walks.WALKS)
    gone = {file for files in listed.values() for file in files if not walks.exists(file)}
    assert not gone, "CONTRIBUTING's walks enter them; write those anew with `make walks`"
