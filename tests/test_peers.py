"The comparison with others (`make peers`): its twin is right, it sees what is wrong, and its results are whole."
import ast, copy, json, math, re, sys
from pathlib import Path
import pytest, torch
root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))
from fastai.optimizer import OptimWrapper
from fastaccum.testing import deviation, toy
from benchmarks.peers import report, right
from benchmarks.peers.bare import Bare
from benchmarks.peers.cases import Data, apart, by_key, cases, make_model, twin, weights
from benchmarks.peers.fastaccum import Fastaccum
from benchmarks.peers.fastai import Fastai

def run(peer, key): return right.run(peer, by_key[key])

@pytest.mark.parametrize('key', ['A','B250','B200','padded','cycle'])
def test_the_twin_is_the_run_on_big_batches(key):
    "The plain loop is fastai's run on batches of 64"
    case = by_key[key]
    data,model = Data(case),make_model(case)
    def opt(ps, **kwargs): return OptimWrapper(ps, torch.optim.SGD, momentum=case.mom, **kwargs)
    learn = toy(64, data=data.ds, model=lambda: copy.deepcopy(model), opt_func=opt)
    if case.cycle: learn.fit_one_cycle(case.epochs, case.lr, moms=(case.mom,)*3, wd=0.)
    else: learn.fit(case.epochs, case.lr, wd=0.)
    losses,lrs,_ = twin(case, model, data, 64)
    assert len(losses)==len(learn.recorder.losses)==case.steps(64)
    assert deviation(weights(model), weights(learn.model))<(1e-8 if case.cycle else 1e-14)
    assert apart(Fastai().recorded_as(losses), [o.item() for o in learn.recorder.losses])<1e-5
    assert apart(lrs, learn.recorder.lrs)<1e-8

fits = [c.key for c in cases if c.kind in ('fit','again','interrupt')]

@pytest.mark.parametrize('key', fits)
def test_fastaccum_is_the_twin(key):
    res = run(Fastaccum, key)
    assert res['outcome']=='ran' and res['steps']==res['expected']==res['recorded']
    assert (key=='fp16' or res['weights']<1e-8) and res['lr']<1e-8 and res['loss']<1e-5

def test_fastaccum_finds_and_measures_as_the_twin():
    found,metric = run(Fastaccum, 'lr_find'),run(Fastaccum, 'metrics')
    assert found['steps']==found['expected']==found['recorded']==24
    assert found['loss']<1e-5 and metric['metric']<1e-6 and metric['recorded']==2

@pytest.mark.parametrize('key', ['zero','negative'])
def test_fastaccum_refuses(key):
    res = run(Fastaccum, key)
    assert res['outcome']=='refused' and 'accum_bs' in res['why']

def test_what_is_wrong_is_seen():
    "The bare loop divides by the number of micro-batches, whatever is in them; fastai steps and records otherwise"
    for key in ('B250','B240','B200','B48','padded','ignored','interrupt'):
        res = run(Bare, key)
        assert res['outcome']=='ran' and res['steps']==res['expected'] and res['weights']>1e-4, key
    for key in ('A','clip','cycle','again'): assert run(Bare, key)['weights']<1e-14, key
    b250,cycle,found = run(Fastai, 'B250'),run(Fastai, 'cycle'),run(Fastai, 'lr_find')
    assert (b250['steps'],b250['expected'],b250['recorded'])==(7,8,32) and b250['loss'] is None
    assert cycle['weights']>1e-3 and cycle['lr']>1e-2 and (found['steps'],found['expected'])==(6,24)
    for key in ('again','interrupt'): assert run(Fastai, key)['weights']>1e-4
    assert run(Bare, 'C40')['outcome']==run(Bare, 'lr_find')['outcome']=='cannot express'
    assert 'NaN' in run(Fastai, 'zero')['what'] and 'went up' in run(Fastai, 'negative')['what']
    nan = float('nan')
    assert apart([1.,nan], [1.,nan])==math.inf and right.moved(torch.ones(2), torch.tensor([1.,nan]))==math.inf

def results(nm): return json.loads((root/f'benchmarks/results/{nm}.json').read_text(encoding='utf-8'))
def keys_of(module):
    "The keys of an adapter's peers, without importing what it needs"
    return set(re.findall(r"^    key,title\S* = '([^']+)'",
        (root/f'benchmarks/peers/{module}.py').read_text(encoding='utf-8'), re.M))
modules = ['bare','fastai','fastxtend','lightning','accelerate','transformers','composer','fastaccum']

def test_results_of_right_are_whole():
    res = results('right')
    assert set(res['peers'])==set().union(*map(keys_of, modules))-{'fastai-plain'}   # which has nothing to accumulate
    assert set(res['cases'])==set(by_key)
    for p in res['peers'].values():
        assert p['version'] and p['how'] and p['docs'].startswith('https://') and set(p['cases'])==set(by_key)
        for o in p['cases'].values():
            assert o['outcome'] in ('ran','refused','cannot express','failed')
            if o['outcome']=='ran': assert 'weights' in o or 'lr' in o or 'what' in o
            else: assert o['why']

def test_results_of_fast_are_whole():
    res = results('fast')
    for model in ('tiny','conv','transformer'):
        assert set(res['cost'][model])==set(res['arms']) and 'fastaccum' in res['arms']
        for o in res['cost'][model].values():
            assert set(o)=={'1','4','16'} and all(v['median']>0 and v['to_bare']>0 for v in o.values())
    assert all(math.isfinite(v) and v>0 for g in res['growth'].values() for o in g.values() for v in o.values())
    peaks = {nm:o['peak'] for nm,o in res['memory'].items()}
    assert set(peaks)==set(res['arms'])|{'big'} and peaks['big']>2*peaks['bare']>0
    assert abs(peaks['fastaccum']-peaks['bare'])<2**10   # nothing but counters
    for o in res['where'].values(): assert set(o)=={'bare','fastai-plain','fastaccum'} and not o['bare']['fastaccum']

def test_what_a_fit_holds_is_what_the_bare_loop_holds():
    "Counted as tensors come and go; a tensor that is kept for each micro-batch would be seen"
    from fastai.callback.core import Callback
    from benchmarks.peers import fast
    class Keeps(Fastaccum):
        def accumulation(self, micro, accum):
            kept = []
            class Keep(Callback):
                def after_loss(self): kept.append(torch.zeros(1000))
            return [*super().accumulation(micro, accum),Keep()]
    bare,ours,more = (fast.memory(o) for o in (Bare,Fastaccum,Keeps))
    assert abs(ours-bare)<2**10 and more-bare>8*4000 and fast.memory(Bare, big=True)>2*bare

def test_cases_have_names():
    assert set(report.names)==set(by_key) and len(set(report.names.values()))==len(by_key)

def test_who_was_not_measured_is_said():
    "Of each module at least one way is in the results of `fast`, or the report says why not"
    for m in modules:
        if not keys_of(m) & set(results('fast')['arms']): assert f'{m.capitalize()} is not here' in report.not_fast, m

@pytest.mark.parametrize('nm', ['right','fast'])
def test_tables_are_those_of_the_results(nm):
    "`make peers` writes both; a change of the report is a change of the file"
    assert (root/f'benchmarks/results/{nm}.md').read_text(encoding='utf-8')==getattr(report, nm)(results(nm))+'\n'

@pytest.mark.parametrize('nm', ['right','fast'])
def test_results_say_when_and_with_what(nm):
    a = results(nm)['about']
    assert re.fullmatch(r'\d{4}-\d\d-\d\d', a['date']) and re.match(r'\d+ CPU cores', a['machine'])
    assert a['torch'] and a['fastai'] and a['fastaccum'] and a['python']

scripts = sorted((root/'benchmarks').rglob('[a-z]*.py'))

@pytest.mark.parametrize('fn', scripts, ids=lambda o: o.relative_to(root).as_posix())
def test_scripts_find_what_they_import(fn):
    "Nobody runs them often, so a name of the package that has moved would go unnoticed"
    for o in ast.walk(ast.parse(fn.read_text(encoding='utf-8'))):
        if isinstance(o, ast.ImportFrom) and not o.level and o.module.partition('.')[0] in ('fastaccum','benchmarks'):
            exec(compile(ast.Module([o], []), fn.name, 'exec'), {})

# Pages that are made from results

def cells(page): return json.loads((root/f'nbs/{page}.ipynb').read_text(encoding='utf-8'))['cells']

def shown(page, ids=()):
    "Run a page's code, or some cells of it: for each table that is saved there, its cell, itself, and what it is now"
    ns = {}
    for c in cells(page):
        if c['cell_type']!='code' or ids and c['id'] not in ids: continue
        code = ast.parse(''.join(c['source']))
        last = code.body.pop() if code.body and isinstance(code.body[-1], ast.Expr) else None
        exec(compile(code, c['id'], 'exec'), ns)
        res = eval(compile(ast.Expression(last.value), c['id'], 'eval'), ns) if last else None
        saved = [''.join(o['data']['text/markdown']) for o in c['outputs'] if 'text/markdown' in o.get('data', {})]
        if saved: yield c['id'],saved[0],getattr(res, 'data', None)

@pytest.mark.nbdev   # and IPython
@pytest.mark.parametrize('page,ids', [
    ('about/compared','imports summary ends others found bad whys tiny conv transformer memory results cases'.split()),
    ('contribute/benchmarks','setup where ways batchnorm rates exchange'.split()), ('guides/whole_batch_losses',())])
def test_pages_show_what_the_results_say(page, ids, monkeypatch):
    "After a new measurement: `make page PAGE=…`"
    monkeypatch.chdir((root/f'nbs/{page}').parent)
    found = list(shown(page, ids))
    assert found and [nm for nm,saved,now in found if saved!=now]==[]

def test_figures_of_the_comparison_are_not_written_by_hand():
    for c in cells('about/compared'):
        text = ''.join(c['source'])
        if c['cell_type']!='markdown': continue
        assert not re.search(r'^\|.*\d(\.\d|e-)', text, re.M), f'{c["id"]}: a table of figures'
        assert not re.search(r'\d\s*(µs|ms|s|[KMG]i?B|bytes|times|%)(?!\w)', text), f'{c["id"]}: a figure'
