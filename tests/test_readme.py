"README.md is short and true: examples run, commands exist, and figures are those that a script prints."
import re, runpy, shutil, subprocess, sys
from pathlib import Path
import fastaccum, fresh, pytest
from readme import project, project_url

root = Path(__file__).resolve().parent.parent
readme = (root/'README.md').read_text(encoding='utf-8')

def blocks(text, lang): return re.findall(fr'^```{lang}\n(.*?)^```$', text, re.M|re.S)

def test_the_examples_run_with_the_class_of_fastaccum():
    "The first example needs a Learner, so it runs with that of the complete example"
    with_your_learner,example,without_callback = blocks(readme, 'python')
    report = "print('RAN', len(learn.recorder.losses), fastaccum.GradientAccumulation.__module__)\n"
    res = fresh.run(example+report+without_callback+with_your_learner+report)
    assert not res.returncode, res.stderr
    out = res.stdout.replace('\r', '\n')   # a progress bar ends its lines with \r
    assert 'RAN 66 fastaccum.' in out and 'RAN 110 fastaccum.' in out   # 22 steps in each of 3, then 5 epochs
    rows = re.findall(r'^\W*[0-5] +(\d\.\d+ .*)\d\d:\d\d', out, re.M)
    losses = [[float(o) for o in row.split()] for row in rows]
    assert len(rows)==3+3+5 and losses[:3]==[pytest.approx(o, rel=1e-4) for o in losses[3:6]]

def test_the_demo_shows_the_same_run(monkeypatch):
    """The steps are those of the full-batch run

    Losses differ from the full-batch run at most a hundredth as much as with fastai's callback.
    """
    import demo
    monkeypatch.setattr(demo, 'n_epoch', 2)
    full,ours,fastais = (demo.train('', bs, cb)[1] for bs,cb in ((256, None), (32, demo.GradientAccumulation(256)),
        (32, demo.FastaiGradientAccumulation(256))))
    assert ours.samples_seen.at==full.samples_seen.at and ours.samples_seen.n_steps==full.samples_seen.n_steps
    assert 100*demo.gaps(ours, full).max()<demo.gaps(fastais, full).max()

def test_the_examples_work_with_imports_in_any_order():
    "With `from fastaccum import …`, fastai's star import could silently replace the name with fastai's own class"
    for o in blocks(readme, 'python')[:2]: assert 'import fastaccum\n' in o and 'fastaccum.GradientAccumulation(' in o

@pytest.mark.skipif(not shutil.which('make'), reason='there is no make here')
def test_the_make_commands_in_readme_and_contributing_exist():
    commands = {o for text in (readme, (root/'CONTRIBUTING.md').read_text(encoding='utf-8'))
        for o in re.findall(r'(?:^|`)make (\w[\w-]*)', text, re.M)}
    assert {'demo','test','docs','docs-serve','docs-test'} <= commands
    for o in sorted(commands):
        res = subprocess.run(['make','-n',o], cwd=root, capture_output=True, text=True)
        assert not res.returncode, res.stderr

def test_the_install_commands_and_versions_are_those_of_the_project():
    "The address and the oldest versions are those of pyproject.toml"
    url = project_url('Repository')
    for o in (f'git clone {url} &&', f'pip install git+{url}\n'): assert o in readme
    python = project()['requires-python'].removeprefix('>=')
    oldest = dict(o.split('>=') for o in project()['dependencies'])
    for o in (readme, (root/'nbs/get_started.ipynb').read_text(encoding='utf-8')):
        assert f'requires Python ≥ {python}, fastai ≥ {oldest["fastai"]} and torch ≥ {oldest["torch"]}.' in o

def test_the_scripts_and_pictures_that_the_readme_names_exist():
    for o in re.findall(r'`python ([\w/]+\.py)', readme)+re.findall(r'!\[[^]]*\]\((?!https:)([^)]+)\)', readme):
        assert (root/o).is_file(), o

def test_the_losses_and_steps_of_fastais_callback_are_those_that_the_script_prints(capsys):
    runpy.run_path(str(root/'benchmarks/remainders.py'), run_name='__main__')
    head,_,*rows = [[o.strip() for o in row.split('|')[1:-1]] for row in capsys.readouterr().out.splitlines()]
    figures = {name:dict(zip(head[1:], values)) for name,*values in rows}
    losses = figures['recorded losses']
    steps = {who:sum(map(int, o.split(' and '))) for who,o in figures['optimizer steps in each epoch'].items()}
    fastais,ours = "fastai's callback",'fastaccum'
    assert f'it recorded {losses[fastais]} losses for {steps[fastais]} steps; ' in readme
    assert f'fastaccum recorded {losses[ours]} for {steps[ours]}.' in readme

def test_the_readme_is_short():
    "The number of words outside of code is limited, and so is the number of links in the list Read on"
    text = re.sub(r'^```.*?^```|<!--.*?-->|!\[.*?\]\(.*?\)', '', readme, flags=re.M|re.S)
    assert len(text.split())<=450
    assert 4<len(re.findall(r'\]\(', readme.partition('## Read on')[2].partition('\n## ')[0]))<=12
