"Models whose parameters are sharded (`fully_shard`) on two and four processes: the run is that of one process"
import os, signal
from pathlib import Path
import pytest, torch
from test_processes import ended, start

pytestmark = pytest.mark.skipif(not hasattr(torch.cpu.Stream, 'record_event'),
    reason='PyTorch 2.6 shards on devices only')
script = Path(__file__).with_name('sharded.py')
cases = [o[len('def case_'):].partition('(')[0] for o in script.read_text().splitlines() if o.startswith('def case_')]

@pytest.fixture(scope='module')
def launches(tmp_path_factory):
    "What each launch wrote, and its exit status; both start at once"
    outs = {n:tmp_path_factory.mktemp(f'on_{n}') for n in (2,4)}
    procs = {n:start(n, out, *(['replicas'] if n==4 else [o for o in cases if o!='replicas']), script=script)
        for n,out in outs.items()}
    yield {n:(outs[n],ended(p, secs=240)) for n,p in procs.items()}
    for p in procs.values():
        if p.poll() is None: os.killpg(p.pid, signal.SIGKILL)

@pytest.mark.parametrize('case', cases)
def test_sharded(launches, case):
    n = 4 if case=='replicas' else 2
    out,(text,rc) = launches[n]
    def read(kind): return [o.read_text() if o.exists() else '' for o in (out/f'{r}.{kind}' for r in range(n))]
    if all(case in o.split() for o in read('passed')): return
    pytest.fail('\n'.join(o for o in read('failed') if o) or f'ended with {rc}: {text[-3000:]}')
