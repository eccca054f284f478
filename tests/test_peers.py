"The comparison with others (`make peers`): its own loop is right, it sees what is wrong, and pages show its results."
import ast, copy, json, sys
from pathlib import Path
import pytest, torch
root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))
from fastai.optimizer import OptimWrapper
from fastaccum.testing import deviation, toy
from benchmarks.peers import fast, report, right
from benchmarks.peers.bare import Bare
from benchmarks.peers.cases import Data, apart, by_key, cases, make_model, twin, weights
from benchmarks.peers.fastaccum import Fastaccum
from benchmarks.peers.fastai import Fastai

def run(peer, key): return right.run(peer, by_key[key])

@pytest.mark.parametrize('key', ['A','B250','padded','cycle'])
def test_the_plain_loop_is_fastais_run_on_big_batches(key):
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

@pytest.mark.parametrize('key', [c.key for c in cases if c.kind in ('fit','again','interrupt')])
def test_fastaccum_is_the_plain_loop(key):
    res = run(Fastaccum, key)
    assert res['outcome']=='ran' and res['steps']==res['expected']==res['recorded']
    assert (key=='fp16' or res['weights']<1e-8) and res['lr']<1e-8 and res['loss']<1e-5

def test_what_is_wrong_is_seen():
    "A loop that divides by the number of micro-batches, whatever is in them; fastai steps and records otherwise"
    for key in ('B250','B240','B48','padded','interrupt'): assert run(Bare, key)['weights']>1e-4, key
    for key in ('A','clip','cycle','again'): assert run(Bare, key)['weights']<1e-14, key
    b250,cycle,found = (run(Fastai, key) for key in ('B250','cycle','lr_find'))
    assert (b250['steps'],b250['expected'],b250['recorded'])==(7,8,32) and b250['loss'] is None
    assert cycle['weights']>1e-3 and cycle['lr']>1e-2 and (found['steps'],found['expected'])==(6,24)
    assert run(Bare, 'lr_find')['outcome']=='cannot express' and run(Fastaccum, 'zero')['outcome']=='refused'

def test_memory_is_counted_as_tensors_come_and_go():
    "fastaccum holds what the plain loop holds, but for counters"
    bare,ours,big = fast.memory(Bare),fast.memory(Fastaccum),fast.memory(Bare, big=True)
    assert abs(ours-bare)<2**10 and big>2*bare

def results(nm): return json.loads((root/f'benchmarks/results/{nm}.json').read_text(encoding='utf-8'))

def test_results_of_right_are_whole():
    res = results('right')
    assert set(res['cases'])==set(by_key)==set(report.names)
    for p in res['peers'].values():
        assert p['version'] and p['docs'].startswith('https://') and set(p['cases'])==set(by_key)
        for o in p['cases'].values(): assert o['outcome']=='ran' or o['why']

@pytest.mark.parametrize('nm', ['right','fast'])
def test_tables_are_those_of_the_results(nm):
    "`make peers` writes both; a change of the report is a change of the file"
    assert (root/f'benchmarks/results/{nm}.md').read_text(encoding='utf-8')==getattr(report, nm)(results(nm))+'\n'

def shown(page):
    "Run a page's code: for each table that is saved there, its cell, itself, and what it is now"
    ns = {}
    for c in json.loads((root/f'nbs/{page}.ipynb').read_text(encoding='utf-8'))['cells']:
        if c['cell_type']!='code': continue
        code = ast.parse(''.join(c['source']))
        last = code.body.pop() if code.body and isinstance(code.body[-1], ast.Expr) else None
        exec(compile(code, c['id'], 'exec'), ns)
        res = eval(compile(ast.Expression(last.value), c['id'], 'eval'), ns) if last else None
        saved = [''.join(o['data']['text/markdown']) for o in c['outputs'] if 'text/markdown' in o.get('data', {})]
        if saved: yield c['id'],saved[0],getattr(res, 'data', None)

@pytest.mark.nbdev   # and IPython
@pytest.mark.parametrize('page', ['about/compared'])
def test_pages_show_what_the_results_say(page, monkeypatch):
    "After a new measurement: `make page PAGE=…`"
    monkeypatch.chdir((root/f'nbs/{page}').parent)
    found = list(shown(page))
    assert found and [nm for nm,saved,now in found if saved!=now]==[]
