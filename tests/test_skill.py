"`skills/fastaccum/SKILL.md`, which tells assistants how to use the package, is right."
import re
from pathlib import Path
import fastaccum, fresh

root = Path(__file__).resolve().parent.parent
text = (root/'skills/fastaccum/SKILL.md').read_text(encoding='utf-8')

def test_the_head_of_the_skill_has_its_name_and_description():
    "agentskills.io asks for the name of the folder, and for a description of at most 1,024 characters"
    head = re.match(r'---\nname: fastaccum\ndescription: (.+)\n---\n\n# ', text)
    assert head and 100<len(head[1])<=1024
    assert len(text.splitlines())<=100   # an assistant reads the whole file each time it uses it

def test_the_code_of_the_skill_runs_in_a_fresh_interpreter_without_a_warning():
    code = ''.join(re.findall(r'^```python\n(.*?)^```$', text, re.M|re.S))
    res = fresh.run(code)
    assert not res.returncode, res.stderr
    assert 'messages.html' not in res.stderr, res.stderr   # warnings of fastaccum link to this page

def test_every_name_exists_and_every_warning_has_a_remedy():
    "Each name after `fastaccum.` exists, and the table of remedies has each class of warnings"
    used = re.findall(r'fastaccum\.([A-Z]\w+)', text)
    used += re.findall(r'`(\w+Warning)`', text) + ['FreezeBN','ScaledLR']
    assert [o for o in used if o not in fastaccum.__all__]==[]
    remedies = text.partition('## Which remedy')[2]
    warned = {o for o in fastaccum.__all__ if o.endswith('Warning')}-{'AccumulationWarning'}
    assert [o for o in warned if f'`{o}`' not in remedies]==[]
