"The comparison with other libraries, `make peers`, has right runs, and the pages show its results."
import ast, json, sys
from pathlib import Path
import pytest
root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))
from benchmarks.peers import right
from benchmarks.peers.bare import Bare
from benchmarks.peers.cases import by_key, cases
from benchmarks.peers.fastaccum import Fastaccum
from benchmarks.peers.fastai import Fastai

def run(peer, key):
    "Return the results of the library `peer` in the case `key`, compared with a plain loop"
    return right.run(peer, by_key[key])

@pytest.mark.parametrize('key', [c.key for c in cases if c.kind in ('fit','again','interrupt')])
def test_fastaccum_gives_the_same_run_as_the_plain_loop(key):
    res = run(Fastaccum, key)
    assert res['outcome']=='ran' and res['steps']==res['expected']==res['recorded']
    assert res['lr']<1e-8 and (key=='fp16' or res['weights']<1e-8) and res['loss']<(8*2**-10 if key=='fp16' else 1e-5)

def test_the_comparison_finds_wrong_runs():
    """`Bare` divides each loss by the number of micro-batches even if sizes differ

    The steps of fastai's callback have other samples.
    """
    for key in ('B250','B240','B48','padded','interrupt'): assert run(Bare, key)['weights']>1e-4, key
    for key in ('A','clip','cycle','again'): assert run(Bare, key)['weights']<1e-14, key
    b250,cycle = (run(Fastai, key) for key in ('B250','cycle'))
    assert (b250['steps'],b250['expected'],b250['recorded'])==(7,8,32) and b250['loss'] is None
    assert cycle['weights']>1e-3 and cycle['lr']>1e-2
    assert run(Bare, 'C40')['outcome']=='not supported' and run(Fastaccum, 'zero')['outcome']=='refused'

scripts = sorted((root/'benchmarks').rglob('[a-z]*.py'))

@pytest.mark.parametrize('fn', scripts, ids=lambda o: o.relative_to(root).as_posix())
def test_the_imports_of_a_benchmark_script_exist(fn):
    "The scripts are rarely run, so a renamed function would go unnoticed without this test"
    for o in ast.walk(ast.parse(fn.read_text(encoding='utf-8'))):
        if isinstance(o, ast.ImportFrom) and not o.level and o.module.partition('.')[0] in ('fastaccum','benchmarks'):
            exec(compile(ast.Module([o], []), fn.name, 'exec'), {})

def tables(page, ids):
    """Run the cells `ids` of a page, or all cells

    For each that shows a table, yield its id, the saved and the new table.
    """
    ns = {}
    for c in json.loads((root/f'nbs/{page}.ipynb').read_text(encoding='utf-8'))['cells']:
        if c['cell_type']!='code' or ids and c['id'] not in ids: continue
        code = ast.parse(''.join(c['source']))
        last = code.body.pop() if code.body and isinstance(code.body[-1], ast.Expr) else None
        exec(compile(code, c['id'], 'exec'), ns)
        res = eval(compile(ast.Expression(last.value), c['id'], 'eval'), ns) if last else None
        saved = [''.join(o['data']['text/markdown']) for o in c['outputs'] if 'text/markdown' in o.get('data', {})]
        if saved: yield c['id'],saved[0],getattr(res, 'data', None)

@pytest.mark.nbdev   # the cells need IPython, which nbdev installs
@pytest.mark.parametrize('page,ids', [
    ('about/compared','summary tiny real lightning'.split()),
    ('contribute/benchmarks','setup scripts right fast rates exchange'.split()),
    ('guides/out_of_memory',('measured',)), ('11_token_budget',('measured',)),
    ('about/works_with',('outcome','set-ups'))])
def test_the_tables_on_pages_are_those_of_the_saved_results(page, ids, monkeypatch):
    "If this fails after a new measurement, run `make page PAGE=…` to save the new tables"
    monkeypatch.chdir((root/f'nbs/{page}').parent)
    found = list(tables(page, ids))
    assert found and [nm for nm,saved,now in found if saved!=now]==[]
