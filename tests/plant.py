"""Plant faults in the package, one at a time, and tell which of them the tests see.

`python tests/plant.py` plants each fault of `tests/faults/*.toml`; `python tests/plant.py memory --tests
laws/test_split.py` those of one file, for some tests. Each fault says in which file of the package what becomes what,
what a user would meet, and which tests are to see it. Needs Python 3.11.
"""
import argparse, os, shutil, sys, time, tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
import run

root = Path(__file__).resolve().parent.parent

def planted(fault, to):
    "A copy of the project in `to`, with the fault: what tests read besides is linked"
    for o in root.iterdir():
        if o.name in ('fastaccum','tests'): shutil.copytree(o, to/o.name, ignore=shutil.ignore_patterns('__pycache__'))
        elif o.name!='.git': (to/o.name).symlink_to(o)
    fn = to/'fastaccum'/fault['file']
    text = fn.read_text(encoding='utf-8')
    n = text.count(fault['was'])
    if n!=1: raise ValueError(f"{fault['file']} has {fault['was']!r} {n} times")
    fn.write_text(text.replace(fault['was'], fault['now']), encoding='utf-8')

def fails(to, tests, secs):
    "In a process of its own: whether one of the tests fails, and which; returns pytest's status"
    import pytest, signal
    os.chdir(to)
    os.setsid()
    signal.alarm(secs)
    sys.path[:0] = [str(to)]
    os.environ['PYTHONPATH'] = str(to)
    args = ['-x', '-q', '--no-header', '-p', 'no:cacheprovider']
    return int(pytest.main([*args, *(str(to/'tests'/o) for o in tests)]))

def see(fault, tests, secs):
    "Which test sees the fault, if any, and after how many seconds"
    start = time.time()
    with TemporaryDirectory() as tmp:
        planted(fault, Path(tmp))
        status,text = run.forked(fails, Path(tmp), tests, secs)
    by = next((l for l in text.splitlines() if l.startswith(('FAILED ','ERROR '))), '')
    # ended by a signal: Python crashed, or the time ran out, which is no verdict: it may be a hang or a busy machine
    if not by and status==-14: by = 'no time'
    elif not by and status not in (0,5): by = f'ended with {status}: {text[-200:]}'
    return by.partition(' - ')[0],time.time()-start

def main(names, tests, secs, jobs):
    faults = [dict(o, area=fn.stem) for fn in sorted((Path(__file__).parent/'faults').glob('*.toml'))
        if not names or fn.stem in names for o in tomllib.loads(fn.read_text(encoding='utf-8'))['fault']]
    run.forks.set_forkserver_preload(run.preload)
    def job(o): return o,*see(o, tests or o['tests'].split(), secs)
    seen = 0
    with ThreadPoolExecutor(jobs) as pool:
        for o,nm,took in pool.map(job, faults):
            seen += nm not in ('','no time')
            is_seen = {'':'NOT SEEN', 'no time':'NO TIME '}.get(nm, 'seen    ')
            print(f"{o['area']:12} {took:4.0f} s  {is_seen}  {o['file']}: {o['what']}  {nm}", flush=True)
    print(f'{seen} of {len(faults)} planted faults were seen')
    return seen<len(faults)

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', help='names of the files in tests/faults; all by default')
    parser.add_argument('--tests', nargs='*', help='test files to run for each fault; its own by default')
    parser.add_argument('--secs', type=int, default=300, help='seconds for each fault')
    parser.add_argument('--jobs', type=int, default=os.cpu_count())
    args = parser.parse_args()
    sys.exit(main(args.names, args.tests, args.secs, args.jobs))
