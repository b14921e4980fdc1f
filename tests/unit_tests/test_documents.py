"""What scripts in ``docs`` write is as they would write it now."""

import runpy

from tests.unit_tests.overlay.conftest import REPOSITORY


def test_the_page_of_functions():
    script = runpy.run_path(str(REPOSITORY / 'docs' / 'draw_api.py'))
    assert script['PAGE'].read_text() == script['page'](), 'run python docs/draw_api.py'
