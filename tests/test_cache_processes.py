"`GradientCache` on two processes: the run without it, and one exchange of gradients per step."
from pathlib import Path
import pytest
from test_processes import ended, start

script = Path(__file__).with_name('cache_processes.py')
cases = [o[len('def case_'):].partition('(')[0] for o in script.read_text().splitlines() if o.startswith('def case_')]

@pytest.fixture(scope='module')
def launch(tmp_path_factory):
    "What two processes have passed, where they failed, and what they wrote"
    out = tmp_path_factory.mktemp('cache')
    text,_ = ended(start(2, out, script=script), secs=240)
    def read(kind): return [o.read_text() if o.exists() else '' for o in (out/f'{r}.{kind}' for r in range(2))]
    return [o.split() for o in read('passed')],read('failed'),text

@pytest.mark.parametrize('case', cases)
def test_two_processes(launch, case):
    passed,failed,text = launch
    assert all(case in o for o in passed), [o for o in failed if o] or text[-3000:]
