"tools/pasted.py runs a notebook as a test, and tools/page.py saves the outputs of a notebook."
import json, subprocess, sys
from pathlib import Path
import page, pasted, pytest

root = Path(__file__).resolve().parent.parent

def notebook(fn, *sources):
    "Write a notebook with a code cell for each of `sources` to the file `fn`, and return `fn`"
    cells = [dict(cell_type='code', id=f'c{i}', metadata={}, outputs=[], execution_count=None, source=o)
        for i,o in enumerate(sources)]
    fn.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)), encoding='utf-8')
    return fn

hidden = '#| hide\nimport math\na = math.pi'

@pytest.mark.nbdev
@pytest.mark.parametrize('sources,why', [
    (['assert 1+1==2'], ''), (['assert 1+1==3'], 'AssertionError'), ([], 'no cells'),
    (['import os\nos.abort()'], 'exit code'),
    ([hidden, '#| hide\nassert a>3'], ''), ([hidden, 'a'], "NameError: name 'a'"),
    (['a = 1', '#| hide\na = 2', 'assert a==1'], ''), (['#| hide\nimport math', 'math.pi'], ''),
    (['#| slow\nassert False'], '')], ids=str)
def test_a_page_fails_if_a_cell_fails_or_if_it_cannot_be_pasted(sources, why, tmp_path):
    found = pasted.failure(notebook(tmp_path/'a.ipynb', *sources))
    assert (why in found.partition('\n')[0]) if why else not found, found

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
