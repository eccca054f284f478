"""Scripts of cases (`def case_…`) that several processes run, each case beside the same on one process.

Each process notes the cases it has passed, and where it has failed, in a folder (`processes.main`)."""
import os, signal, subprocess, sys
from pathlib import Path
import pytest

def script_of(name):
    "A script in this folder, and its cases"
    script = Path(__file__).with_name(name)
    lines = script.read_text().splitlines()
    return script,[o[len('def case_'):].partition('(')[0] for o in lines if o.startswith('def case_')]

def start(n, out, *names, script):
    "Start `n` processes that run the cases `names` of `script`"
    env = os.environ | dict(OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='', MPLBACKEND='agg',
        PYTHONPATH=os.pathsep.join([str(script.parent.parent), str(script.parent)]))
    cmd = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(n), str(script),
        str(out), *names]
    return subprocess.Popen(cmd, env=env, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True)

def ended(p, secs):
    "What `p` wrote, and its exit status; `None` if it had to be ended after `secs`"
    try: return p.communicate(timeout=secs)[0],p.returncode
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        return p.communicate()[0],None

def launching(script, names):
    "A fixture: for each number of processes in `names`, a launch of its cases; all are started at once"
    @pytest.fixture(scope='module')
    def launches(tmp_path_factory):
        outs = {n:tmp_path_factory.mktemp(f'{script.stem}_on_{n}') for n in names}
        procs = {n:start(n, out, *names[n], script=script) for n,out in outs.items()}
        yield {n:(outs[n],p,[]) for n,p in procs.items()}
        for p in procs.values():
            if p.poll() is None: os.killpg(p.pid, signal.SIGKILL)
    return launches

def end(launches, n):
    "What the launch of `n` processes wrote, and its exit status"
    _,p,res = launches[n]
    if not res: res += ended(p, secs=400)
    return res

def check(launches, n, case):
    "Fail unless all of `n` processes have passed `case`"
    out,(text,rc) = launches[n][0],end(launches, n)
    def read(kind): return [o.read_text() if o.exists() else '' for o in (out/f'{r}.{kind}' for r in range(n))]
    passed,failed = [o.split() for o in read('passed')],read('failed')
    if all(case in o for o in passed): return
    mine = [o for o in failed if o.startswith(f'{case}\n')]
    if mine: pytest.fail(mine[0])
    pytest.fail(f'not reached: {[o.splitlines()[0] for o in failed if o]} failed before'
        if any(failed) else f'ended with {rc}: {text[-3000:]}')
