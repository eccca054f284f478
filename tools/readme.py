"""Write README.md and its pictures from nbs/index.ipynb; with `--check`, say whether they are in step.

Code, text and outputs are taken as they are saved in the notebook: nothing is run, and nothing but Python is needed.
"""
import json, re, sys
from base64 import b64decode
from pathlib import Path

root = Path(__file__).resolve().parent.parent
nb_path = root/'nbs/index.ipynb'
note = '<!-- Written by tools/readme.py from nbs/index.ipynb: edit that. -->'
re_directive = re.compile(r'^\s*#\s*\|\s*(.*)')
hidden = {'hide', 'hide: true', 'include: false'}

def docs_url():
    text = (root/'pyproject.toml').read_text(encoding='utf-8')
    return re.search(r'^Documentation *= *"(.+?)/?"', text, re.M)[1]

def colab_url(path):
    "Where the notebook at `path` opens in Colab"
    text = (root/'pyproject.toml').read_text(encoding='utf-8')
    repository = re.search(r'^Repository *= *"https://github.com/(.+?)/?"', text, re.M)[1]
    return f'https://colab.research.google.com/github/{repository}/blob/main/{path}'

def link_pages(text, url, folder=''):
    "Point links to notebooks at the pages made of them: `01_x.ipynb` becomes `x.html`"
    def page(m):
        *folders,nm = m[1].lower().split('/')
        path = [o for o in folder.split('/') if o]
        for o in folders:
            if o=='..': path.pop()
            elif o!='.': path.append(o)
        return f']({"/".join([url, *path, re.sub(r"^[0-9]+[a-z0-9]*_", "", nm)])}.html'
    return re.sub(r'\]\((?!\w+:)([^)#\s]+)\.ipynb', page, text)

def title(text): return '\n'.join(o for o in text.splitlines() if not o.startswith('- '))   # nbdev's `- key: value`

def fence(text, lang=''): return f'```{lang}\n{text.rstrip()}\n```'

def shown(text):
    "What a terminal shows of `text` in the end: of a progress bar, the last state"
    return '\n'.join(o.rstrip('\r ').rsplit('\r', 1)[-1] for o in text.split('\n'))

def output(o, alt, image, link):
    "A cell's output as Markdown; `image(data)` says where its picture is, `link` makes its links those of pages"
    if o['output_type']=='error': raise ValueError(f'a saved output is an error: {o["ename"]}: {o["evalue"]}')
    if o['output_type']=='stream': return fence(shown(''.join(o['text'])))
    data = o['data']
    plain = ''.join(data.get('text/plain', ''))
    if 'text/markdown' in data: return link(''.join(data['text/markdown']).rstrip())
    if 'image/png' in data: return f'![{alt}]({image(b64decode("".join(data["image/png"])))})'
    if not plain or plain.startswith('<IPython') or any(k.startswith('image/') for k in data):
        raise ValueError(f'an output that README.md cannot show: {", ".join(data)}')
    return fence(plain)

def code(cell, image, link):
    "A code cell and its outputs as Markdown, without nbdev's directives"
    lines = ''.join(cell['source']).splitlines()
    options = [m[1].strip() for m in map(re_directive.match, lines) if m]
    if hidden & set(options): return []
    source = '\n'.join(o for o in lines if not re_directive.match(o)).strip('\n')
    alt = next((o.split(':', 1)[1].strip(' "') for o in options if o.startswith('fig-alt:')), '')
    shown = bool(source) and not {'code-fold: true','echo: false'}&set(options)
    outputs = [output(o, alt, lambda data: image(cell['id'], data), link) for o in cell['outputs']]
    return [fence(source, 'python')]*shown + outputs

def markdown(nb, url, image, folder=''):
    "The notebook `nb` as Markdown; `image(id, data)` says where the picture that cell `id` drew is to be found"
    parts = []
    def link(text): return link_pages(text, url, folder)
    for i,c in enumerate(nb['cells']):
        text = ''.join(c['source'])
        if c['cell_type']=='markdown': parts.append(link(text if i else title(text)).strip())
        elif c['cell_type']=='code': parts += code(c, image, link)
    return '\n\n'.join(parts) + '\n'

def main(check=False):
    files = {}
    def image(id, data):
        files[f'images/{id}.png'] = data
        return f'images/{id}.png'
    text = markdown(json.loads(nb_path.read_text(encoding='utf-8')), docs_url(), image)
    files['README.md'] = f'{note}\n\n{text}'.encode()
    for nm,data in files.items():
        fn = root/nm
        if check and (not fn.exists() or fn.read_bytes()!=data):
            return f'{nm} is not in step with nbs/index.ipynb: make readme'
        fn.parent.mkdir(exist_ok=True)
        if not check: fn.write_bytes(data)

if __name__=='__main__': sys.exit(main('--check' in sys.argv[1:]))
