"""Run the notebooks and the tests, and count them: what `make test` does.

`python tests/run.py split canaries` runs only the notebooks and the test files with one of these words in their names;
`python tests/run.py out_of_memory --times 50` runs them that many times, to find what fails now and then.
`python tests/run.py --portable` runs them as other processors would.
"""
import argparse, gc, multiprocessing, os, subprocess, sys, time
from ast import literal_eval
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

root = Path(__file__).resolve().parent.parent
# what takes longest comes first, so that none of it is left alone at the end
slow = ('test_site','test_processes','text','batchnorm','test_applications','test_bs_find',
    'test_out_of_memory','test_cache','test_checkpoint','test_nothing_left','images','growing','segmentation',
    'accum_check')
# Each processor rounds in its own way, which these settings show on one: the kernels of older ones, and two threads
portable = {
    'SSE4.1 for oneDNN': dict(ONEDNN_MAX_CPU_ISA='SSE41'),
    'AVX2 for oneDNN and PyTorch': dict(ONEDNN_MAX_CPU_ISA='AVX2', ATEN_CPU_CAPABILITY='avx2'),
    "PyTorch's plain kernels": dict(ATEN_CPU_CAPABILITY='default'),
    "AVX2 for MKL, two threads": dict(MKL_ENABLE_INSTRUCTIONS='AVX2', OMP_NUM_THREADS='2', OMP_WAIT_POLICY='passive')}
os.environ.setdefault('OMP_NUM_THREADS', '1')   # the models are tiny: threads only cost
os.environ.setdefault('MPLBACKEND', 'agg')

# Each notebook and each file of tests runs in a process of its own, so that one which dies takes no other with it.
# They are forks of one that has imported fastai, which takes longer than most of them do.
forks = multiprocessing.get_context('forkserver')
preload = ['fastai.vision.all','fastai.text.all','fastai.tabular.all','nbdev.showdoc','nbdev.test','IPython','pytest',
    'hypothesis']

def pasted(Shell):
    """A `Shell` in which the cells that the site shows do without the names of those that it hides, so that a page
    runs when it is pasted. Hidden cells see all names; what they name is put away after them"""
    sys.path.insert(0, str(root/'docs'))
    from build import hides
    class Pasted(Shell):
        def cell(self, cell, **kwargs):
            if cell.cell_type!='code' or not hides(cell.directives_, cell.source): return super().cell(cell, **kwargs)
            seen = dict(self.user_ns)
            self.user_ns.update(self.__dict__.setdefault('away', {}))
            super().cell(cell, **kwargs)
            for nm,o in list(self.user_ns.items()):
                if nm.startswith('_') or nm in seen and seen[nm] is o: continue
                self.away[nm] = o
                if nm in seen: self.user_ns[nm] = seen[nm]
                else: del self.user_ns[nm]
    return Pasted

def test_notebook(fn):
    """In its process: run the notebook `fn` as `nbdev-test` does, but so that what the site hides is not needed; 0 if
    it passed"""
    from nbdev import test
    from nbdev.config import get_config
    skip = set(get_config(root).tst_flags.split())-({'slow'} if os.environ.get('TESTS')=='all' else set())
    test.CaptureShell = pasted(test.CaptureShell)
    return int(not test.test_nb(fn, skip_flags=skip, basepath=root)[0])

def test_file(fn, xml):
    "In its process: run the tests in the file `fn`, and write pytest's report to `xml`"
    import pytest
    return int(pytest.main(['-q', '-ra', '-p', 'no:cacheprovider', f'--junitxml={xml}', str(fn)]))

def in_its_process(f, args, out, start):
    "Call `f`; what it writes goes to the file `out`, also what its own processes write, which begin as `start` says"
    multiprocessing.set_start_method(start, force=True)   # otherwise as this one did, and each imports fastai again
    gc.freeze()   # what was imported stays, and need not be looked at
    with open(out, 'wb') as file:
        for o in (1,2): os.dup2(file.fileno(), o)
    res = f(*args)
    for o in (sys.stdout,sys.stderr): o.flush()
    os._exit(res)   # without waiting for what a test may have left running

def forked(f, *args):
    "How `f` ended in a process of its own, and what was written"
    with TemporaryDirectory() as tmp:
        out = Path(tmp)/'out'
        p = forks.Process(target=in_its_process, args=(f,args,out,multiprocessing.get_start_method()))
        p.start()
        p.join()
        return p.exitcode,out.read_text(encoding='utf-8', errors='replace') if out.exists() else ''

def run_notebook(fn):
    "The outcome of the notebook `fn`, its name and how it ended, and what it wrote"
    status,text = forked(test_notebook, fn)
    nm,said = str(fn.relative_to(root)),text.strip().rpartition('\n')[2]
    return [(f'{nm} - {said[:200]}', 'failed') if status else (nm, 'passed')],text

def outcomes(xml):
    "The outcome of each test in pytest's report: its name, with what it said if it did not pass, and its worst end"
    res,ends = {},dict(failure='failed', error='failed', skipped='skipped')
    for o in ElementTree.parse(xml).iter('testcase'):
        nm = '::'.join(filter(None, (o.get('classname'),o.get('name'))))
        bad = next((c for c in o if c.tag in ends), None)
        if bad is None:
            res.setdefault(nm, (nm,'passed'))
            continue
        said = bad.get('message', '')
        if said=='collection skipped': said = literal_eval(bad.text)[2]   # of a file, with the place of the `skip`
        res[nm] = f'{nm} - {said.partition(chr(10))[0][:200]}',ends[bad.tag]
    return list(res.values())

def run_file(fn):
    """The outcomes of the tests in the file `fn`, and what pytest wrote; one more has failed if it ended badly without
    saying where"""
    with TemporaryDirectory() as tmp:
        xml = Path(tmp)/'report.xml'
        status,text = forked(test_file, fn, xml)
        outs = outcomes(xml) if xml.exists() else []
    if status not in (0,5) and not any(o=='failed' for _,o in outs): outs.append((str(fn), 'failed'))   # 5: no tests
    return outs,text

def run(fns):
    "The outcomes of notebooks and files of tests"
    forks.set_forkserver_preload(preload)
    def job(fn):
        start = time.time()
        return (run_notebook if fn.suffix=='.ipynb' else run_file)(fn),time.time()-start
    def first(fn): return next((i for i,o in enumerate(slow) if o in fn.stem), len(slow))
    res = []
    n = min((os.cpu_count() or 1)//int(os.environ['OMP_NUM_THREADS']), 8)   # their threads would wait for each other
    with ThreadPoolExecutor(max(1, n)) as pool:
        jobs = {pool.submit(job, fn): fn for fn in sorted(fns, key=first)}
        for o in as_completed(jobs):
            (outs,text),secs = o.result()
            res += outs
            bad = any(o=='failed' for _,o in outs)
            print(f'{jobs[o].relative_to(root)}  {"FAILED" if bad else "ok"}  {len(outs)}  {secs:.1f}s', flush=True)
            if bad: print(text, flush=True)
    return res

def main(*names, times=1):
    from nbdev.doclinks import nbglob
    def wanted(fns): return sorted(o for o in fns if not names or any(nm in o.stem for nm in names))
    os.chdir(root)   # nbdev looks for its settings from here
    pages,tests = wanted(nbglob(root/'nbs', as_path=True)),wanted((root/'tests').rglob('test_*.py'))
    outs = run(times*[*pages,*tests])
    missing = [] if names and outs else [nm for nm,o in (('notebooks',pages), ('tests',tests)) if not o]
    outs += [(f'no {nm} were run', 'failed') for nm in missing]
    # at the end, where all that is kept of a long log may be its end
    for kind in ('skipped','failed'):
        for nm in (nm for nm,o in outs if o==kind): print(f'{kind.upper()} {nm}')
    counts = Counter(o for _,o in outs)
    print(f'{counts["passed"]} passed, {counts["failed"]} failed' +
        (f', {counts["skipped"]} skipped' if counts['skipped'] else ''))
    return counts['failed']>0

def everywhere(*names):
    "Run notebooks and tests with each of the `portable` settings"
    bad = []
    for nm,env in portable.items():
        print(f'\n{nm}: {" ".join(f"{k}={v}" for k,v in env.items())}', flush=True)
        if subprocess.run([sys.executable, __file__, *names], env=os.environ|env).returncode: bad.append(nm)
    print(f'{len(portable)-len(bad)} passed, {len(bad)} failed' + (f': {", ".join(bad)}' if bad else ''))
    return len(bad)>0

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', help='words in the names of notebooks and test files')
    parser.add_argument('--times', type=int, default=1, help='how often to run each')
    parser.add_argument('--portable', action='store_true', help='as other processors would: each rounds in its own way')
    args = parser.parse_args()
    if args.times<1: parser.error(f'--times {args.times}: give at least 1')
    sys.exit(everywhere(*args.names) if args.portable else main(*args.names, times=args.times))
