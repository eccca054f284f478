"`skills/fastaccum/SKILL.md` tells assistants how to use the package: its code runs, and it names things that exist."
import os, re, subprocess, sys
from pathlib import Path
import fastaccum

root = Path(__file__).resolve().parent.parent
text = (root/'skills/fastaccum/SKILL.md').read_text(encoding='utf-8')

def test_its_head_names_it_and_says_when_to_use_it():
    "As agentskills.io asks for: the name is that of the folder, the description has at most 1,024 characters"
    head = re.match(r'---\nname: fastaccum\ndescription: (.+)\n---\n\n# ', text)
    assert head and 100<len(head[1])<=1024
    assert len(text.splitlines())<=100   # it is read as a whole, each time

def test_its_code_runs_in_a_fresh_interpreter_without_a_loss_warning(tmp_path):
    code = ''.join(re.findall(r'^```python\n(.*?)^```$', text, re.M|re.S))
    file = tmp_path/'skill.py'
    file.write_text(code, encoding='utf-8')
    path = os.pathsep.join([str(root), os.environ.get('PYTHONPATH', '')])
    env = os.environ | dict(PYTHONPATH=path, PYTHONIOENCODING='utf-8')
    res = subprocess.run([sys.executable, file], cwd=tmp_path, env=env, capture_output=True, text=True,
        encoding='utf-8')
    assert not res.returncode, res.stderr
    assert 'messages.html' not in res.stderr, res.stderr   # no warning of fastaccum

def test_every_name_exists_and_every_warning_has_a_remedy():
    "What is imported from fastaccum, and the classes of warnings"
    used = re.findall(r'fastaccum\.([A-Z]\w+)', text)
    used += re.findall(r'`(\w+Warning)`', text) + ['FreezeBN','ScaledLR']
    assert [o for o in used if o not in fastaccum.__all__]==[]
    remedies = text.partition('## Which remedy')[2]
    warned = {o for o in fastaccum.__all__ if o.endswith('Warning')}-{'AccumulationWarning'}
    assert [o for o in warned if f'`{o}`' not in remedies]==[]
