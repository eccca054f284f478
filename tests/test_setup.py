"What make does for those who work on fastaccum: pages, and how a run of the tests ends."
from pathlib import Path
import pytest, run

root = Path(__file__).resolve().parent.parent
import page

# Pages

def stream(*text, name='stdout'): return dict(output_type='stream', name=name, text=list(text))

@pytest.mark.parametrize('a,b,same', [('loss 1e-16','loss 6e-17',1), ('0.0','2.7e-17',1), ('1.677985','1.677984',1),
    ('0 2.1 00:01','0 2.1 00:12',1), ('same (0.2 s)','same (13.4 s)',1), ('<f at 0x7f12>','<f at 0x55aa>',1),
    ('loss 1e-16','loss 1e-8',0), ('1.677985','1.67902',0), ('100000','100001',0), ('1 2','1 2 3',0),
    ('good','bad',0), ('good',[],0)])
def test_outputs_that_say_the_same_are_not_saved_anew(a, b, same):
    "But for times, addresses and rounding"
    a,b = ([stream(o)] if isinstance(o, str) else o for o in (a,b))
    def nb(outs): return dict(cells=[dict(cell_type='code', id='x', outputs=outs)])
    merged,changed = page.merged(nb(a), nb(b))
    assert page.same(a, b)==bool(same) and changed==([] if same else ['x'])
    assert page.same(merged['cells'][0]['outputs'], a if same else b)

def test_what_is_not_saved():
    "Warnings of other packages, where things lie on this machine, and which line of a cell warned"
    site = '/opt/x/lib/python3.12/site-packages'
    outs = [stream(f'{site}/torch/jit.py:12: FutureWarning: old\n  warnings.warn(\n', name='stderr'),
        stream('a\n', f'{root}/fastaccum/x.py and '), stream(f'{site}/fastai/y.py\n'),
        stream(*['<ipython-input-5-1e6c>:16: MyWarning: b\nMore: c\n  fit(1)\n']*2)]
    assert page.joined(outs)==[stream('a\n', 'fastaccum/x.py and fastai/y.py\n', 'MyWarning: b\n', 'More: c\n')]

# The run of the tests

@pytest.mark.nbdev
def test_a_run_ends_with_what_failed_and_the_count(monkeypatch, capsys):
    ran,outs = [],[('a.ipynb','passed'), ('test_c::d - why','failed'), ('test_c::e - type this','skipped')]
    monkeypatch.setattr(run, 'run', lambda fns: ran.extend(fns) or outs)
    assert run.main('setup', times=3) and [o.stem for o in ran]==['test_setup']*3
    assert capsys.readouterr().out.splitlines()==['SKIPPED test_c::e - type this', 'FAILED test_c::d - why',
        '1 passed, 1 failed, 1 skipped']
    monkeypatch.setattr(run, 'run', lambda fns: [])
    assert run.main('nowhere') and capsys.readouterr().out.splitlines()[-1]=='0 passed, 2 failed'

tests = """
import pytest
@pytest.fixture
def bad():
    yield
    raise ValueError
def test_good(): pass
def test_wrong(): assert False
def test_ends_badly(bad): pass
def test_skipped(): pytest.skip('type this')
"""
@pytest.mark.parametrize('code,ends', [(tests,['passed','failed','failed','skipped']), ('',[]),
    ("import pytest\npytest.skip('type this', allow_module_level=True)",['skipped']), ('def test_(',['failed']),
    ('def test_dies():\n    import os\n    os._exit(3)',['failed'])])
def test_outcomes_of_a_file(code, ends, tmp_path):
    "Each test counts once; a file that dies, or that cannot be read, has failed; what is skipped says why"
    (tmp_path/'test_it.py').write_text(code)
    outs = run.run_file(tmp_path/'test_it.py')[0]
    assert [o for _,o in outs]==ends and all('type this' in nm for nm,o in outs if o=='skipped')
