"tools/pasted.py runs a notebook as a test, and tools/page.py saves the outputs of a notebook."
import ast, builtins, functools, json, subprocess, sys
from importlib import import_module
from pathlib import Path
from symtable import symtable
import page, pasted, pytest

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'docs'))

def notebook(fn, *sources):
    "Write a notebook with a code cell for each of `sources` to the file `fn`, and return `fn`"
    cells = [dict(cell_type='code', id=f'c{i}', metadata={}, outputs=[], execution_count=None, source=o)
        for i,o in enumerate(sources)]
    fn.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)), encoding='utf-8')
    return fn

asserts_a_warning = "with warnings.catch_warnings(record=True) as w: warnings.warn('a')\nassert w"
hidden = '#| hide\nimport math\na = math.pi'

@pytest.mark.nbdev
@pytest.mark.parametrize('sources,why', [
    (['assert 1+1==2'], ''), (['assert 1+1==3'], 'AssertionError'), ([], 'no cells'),
    (['import os\nos.abort()'], 'exit code'),
    ([hidden, '#| hide\nassert a>3'], ''), ([hidden, 'a'], "NameError: name 'a'"),
    (['a = 1', '#| hide\na = 2', 'assert a==1'], ''), (['#| hide\nimport math', 'math.pi'], ''),
    (['#| slow\nassert False'], ''), (['import warnings', asserts_a_warning], 'AssertionError'),
    (['import warnings', "warnings.simplefilter('default')", asserts_a_warning], '')], ids=str)
def test_a_page_fails_if_a_cell_fails_or_if_it_cannot_be_pasted(sources, why, tmp_path):
    found = pasted.failure(notebook(tmp_path/'a.ipynb', *sources))
    assert (why in found.partition('\n')[0]) if why else not found, found

@pytest.mark.nbdev
def test_a_page_writes_its_files_into_a_folder_that_is_removed(tmp_path):
    "The page also finds the measurements of the repository"
    source = "from pathlib import Path\nPath('written').touch()\nassert Path('../benchmarks/results').is_dir()"
    fn = notebook(tmp_path/'a.ipynb', source)
    assert pasted.failure(fn)==''
    assert [o.name for o in tmp_path.iterdir()]==['a.ipynb']

def test_a_guide_installs_fastaccum_in_colab_and_nowhere_else(monkeypatch):
    "The second cell of all guides is the same, and installs fastaccum: copy it into a new guide"
    guides = [root/'nbs/get_started.ipynb', *(root/'nbs/guides').glob('*.ipynb')]
    sources = {''.join(json.loads(fn.read_text(encoding='utf-8'))['cells'][1]['source']) for fn in guides}
    assert len(sources)==1
    installed = []
    monkeypatch.setattr(subprocess, 'run', lambda cmd, **kwargs: installed.append(cmd[-1]))
    code, = sources
    exec(code, {})
    assert not installed
    monkeypatch.setitem(sys.modules, 'google.colab', sys)
    exec(code, {})
    assert installed==['git+https://github.com/fastaccum/fastaccum']

@pytest.mark.nbdev
def test_pytest_collects_every_notebook():
    from nbdev.doclinks import nbglob
    cmd = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-n0', 'nbs']
    collected = subprocess.run(cmd, cwd=root, capture_output=True, text=True).stdout
    pages = {o.relative_to(root).as_posix() for o in nbglob(root/'nbs', as_path=True)}
    assert len(pages)>40 and {o.removesuffix('::page') for o in collected.split() if o.endswith('::page')}==pages

# The code that a page of the site shows

@functools.cache
def star_names(module):
    "Return the names that `from module import *` defines"
    mod = import_module(module)
    return set(getattr(mod, '__all__', None) or [nm for nm in vars(mod) if nm[0]!='_'])

def defined_and_used(source):
    "Return the names that a cell defines, those it uses at once, and those that only its functions use"
    defined,used,used_later = set(),set(),set()
    for o in ast.walk(ast.parse(source)):
        if isinstance(o, ast.ImportFrom) and o.names[0].name=='*': defined |= star_names(o.module)
    def visit(scope, is_top):
        for o in scope.get_symbols():
            if not is_top and not o.is_global(): continue
            if o.is_assigned() or o.is_imported(): defined.add(o.get_name())
            if o.is_referenced(): (used if is_top else used_later).add(o.get_name())
        for child in scope.get_children(): visit(child, False)
    visit(symtable(source, 'page', 'exec'), True)
    return defined,used,used_later

def undefined_names(sources):
    "Return the names that the cells of a page use without having defined or imported them"
    from IPython.core.inputtransformer2 import TransformerManager
    known = {*dir(builtins), '__name__', '__file__', 'get_ipython', 'display'}
    undefined,later = set(),set()
    for source in sources:
        defined,used,used_later = defined_and_used(TransformerManager().transform_cell(source))
        known |= defined
        undefined |= used-known
        later |= used_later
    return undefined | later-known

@pytest.mark.nbdev
def test_a_name_without_an_import_is_noticed():
    assert undefined_names(['import torch\ntorch.ones(n)']) == {'n'}
    assert undefined_names(['def f(): return a+b', 'a = 1']) == {'b'}
    assert undefined_names(['a', 'a = 1']) == {'a'}
    star = '%matplotlib inline\nfrom math import *\nx = [o*pi for o in range(3)]'
    assert not undefined_names([star, 'def f(): return len(x)'])

@pytest.mark.nbdev
def test_the_code_that_a_page_shows_can_be_pasted_into_a_new_interpreter():
    "Of a module that users import, the page for users shows some of the cells, and another page shows all of them"
    import build
    from nbdev.doclinks import nbglob
    wrong = {}
    for fn in nbglob(root/'nbs', as_path=True):
        p = build.Page(fn)
        for name,cells in (p.whole, p.shown(p.cells)),(p.name, p.api_cells() if p.is_api else ()):
            shown = [c for c in cells if c.cell_type=='code' and 'remove-input' not in c.metadata.get('tags', ())]
            wrong[name] = wrong.get(name, set()) | undefined_names(c.source for c in shown)
    assert {name:names for name,names in wrong.items() if names}=={}

# The outputs that `make page` saves

def stream(*text, name='stdout'): return dict(output_type='stream', name=name, text=list(text))

@pytest.mark.parametrize('a,b,same', [('loss 1e-16','loss 6e-17',True), ('1.677985','1.677984',True),
    ('0 2.1 00:01','0 2.1 00:12',True), ('<f at 0x7f12>','<f at 0x55aa>',True), ('loss 1e-16','loss 1e-8',False),
    ('1.677985','1.67902',False), ('100000','100001',False), ('1 2','1 2 3',False), ('good','bad',False)])
def test_an_output_is_saved_if_it_differs_in_more_than_times_addresses_and_rounding(a, b, same):
    def nb(text): return dict(cells=[dict(cell_type='code', id='x', outputs=[stream(text)])])
    merged,changed = page.merged(nb(a), nb(b))
    assert changed==([] if same else ['x']) and merged==nb(a if same else b)

def test_warnings_of_other_packages_and_paths_of_this_machine_are_not_saved():
    site = '/opt/x/lib/python3.12/site-packages'
    outs = [stream(f'{site}/torch/jit.py:12: FutureWarning: old\n  warnings.warn(\n', name='stderr'),
        stream('a\n', f'{root}/fastaccum/x.py and '), stream(f'{site}/fastai/y.py\n'),
        stream(*['<ipython-input-5-1e6c>:16: MyWarning: b\nMore: c\n  fit(1)\n']*2)]
    assert page.joined(outs)==[stream('a\n', 'fastaccum/x.py and fastai/y.py\n', 'MyWarning: b\n', 'More: c\n')]
