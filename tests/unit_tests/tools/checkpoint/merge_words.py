"""The merge's command line, called in this process."""

from tools.checkpoint.weighted_merge import main


def cli(*words):
    """The exit status; of each argument what is between its spaces, so that a line may be one."""
    return main(' '.join(map(str, words)).split(' '))


def refused(capsys, *words):
    """The one line of a merge that is refused."""
    assert cli(*words) == 1
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and error.startswith('error: ')
    return error
