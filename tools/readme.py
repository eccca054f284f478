"""Write README.md from nbs/index.ipynb; with `--check`, say whether it is in step.

Code and text are taken as they are saved in the notebook: nothing is run, and nothing but Python is needed.
"""
import json, re, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
nb_path,readme = root/'nbs/index.ipynb',root/'README.md'
note = '<!-- Written by tools/readme.py from nbs/index.ipynb: edit that. -->'
re_directive = re.compile(r'^\s*#\s*\|\s*(.*)')
hidden = {'hide', 'hide: true', 'include: false'}

def docs_url():
    text = (root/'pyproject.toml').read_text(encoding='utf-8')
    return re.search(r'^Documentation *= *"(.+?)/?"', text, re.M)[1]

def link_pages(text, url):
    "Point links to notebooks at the pages nbdev makes of them: `01_x.ipynb` becomes `x.html`"
    def page(m):
        *folders,nm = m[1].lower().removeprefix('./').split('/')
        return f']({"/".join([url, *folders, re.sub(r"^[0-9]+[a-z0-9]*_", "", nm)])}.html'
    return re.sub(r'\]\((?!\w+:)([^)#\s]+)\.ipynb', page, text)

def title(text): return '\n'.join(o for o in text.splitlines() if not o.startswith('- '))   # nbdev's `- key: value`

def fence(text, lang=''): return f'```{lang}\n{text.rstrip()}\n```'

def shown(text):
    "What a terminal shows of `text` in the end: of a progress bar, the last state"
    return '\n'.join(o.rstrip('\r ').rsplit('\r', 1)[-1] for o in text.split('\n'))

def output(o):
    "A cell's output as Markdown"
    if o['output_type']=='error': raise ValueError(f'a saved output is an error: {o["ename"]}: {o["evalue"]}')
    if o['output_type']=='stream': return fence(shown(''.join(o['text'])))
    data = o['data']
    plain = ''.join(data.get('text/plain', ''))
    if 'text/markdown' in data: return ''.join(data['text/markdown']).rstrip()
    if not plain or plain.startswith('<IPython') or any(k.startswith('image/') for k in data):
        raise ValueError(f'an output that README.md cannot show: {", ".join(data)}')
    return fence(plain)

def code(cell):
    "A code cell and its outputs as Markdown, without nbdev's directives"
    lines = ''.join(cell['source']).splitlines()
    if any(m and m[1].strip() in hidden for m in map(re_directive.match, lines)): return []
    source = '\n'.join(o for o in lines if not re_directive.match(o)).strip('\n')
    return [fence(source, 'python')]*bool(source) + [output(o) for o in cell['outputs']]

def markdown(nb, url):
    "The notebook `nb` as Markdown"
    parts = [note]
    for i,c in enumerate(nb['cells']):
        text = ''.join(c['source'])
        if c['cell_type']=='markdown': parts.append(link_pages(text if i else title(text), url).strip())
        elif c['cell_type']=='code': parts += code(c)
    return '\n\n'.join(parts) + '\n'

def main(check=False):
    res = markdown(json.loads(nb_path.read_text(encoding='utf-8')), docs_url())
    if not check: readme.write_bytes(res.encode())
    elif not readme.exists() or readme.read_bytes()!=res.encode():
        return 'README.md is not in step with nbs/index.ipynb: make readme'

if __name__=='__main__': sys.exit(main('--check' in sys.argv[1:]))
