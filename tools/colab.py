"""Give each guide its first cell for Colab, which installs fastaccum there and does nothing elsewhere.

`python tools/colab.py` adds the cell where it is lacking; with `--check` it only says where.

Needs nothing but Python. The button that opens a guide in Colab is made by docs/build.py, from the file's name.
"""
import json, re, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
repository = re.search(r'^Repository *= *"(.+?)/?"', (root/'pyproject.toml').read_text(encoding='utf-8'), re.M)[1]
source = f'''#| hide
import subprocess, sys
if 'google.colab' in sys.modules:   # install fastaccum; does nothing elsewhere
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', 'git+{repository}'], check=True)'''

def lacks(nb):
    "Is the cell after the title another one?"
    return ''.join(nb['cells'][1]['source'])!=source

def main(check=False):
    fns = [root/'nbs/get_started.ipynb',*sorted((root/'nbs/guides').glob('*.ipynb'))]
    read = {fn: json.loads(fn.read_text(encoding='utf-8')) for fn in fns}
    lacking = {fn: nb for fn,nb in read.items() if lacks(nb)}
    if check and lacking:
        return f'without the cell for Colab: {", ".join(o.stem for o in lacking)}; python tools/colab.py adds it'
    for fn,nb in lacking.items():
        cells = [c for c in nb['cells'] if c['id']!='colab']
        cell = dict(cell_type='code', execution_count=None, id='colab', metadata={}, outputs=[],
            source=source.splitlines(True))
        nb['cells'] = [cells[0], cell, *cells[1:]]
        fn.write_text(json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False)+'\n', encoding='utf-8')
        print(f'{fn.relative_to(root)}: cell added')

if __name__=='__main__': sys.exit(main('--check' in sys.argv[1:]))
