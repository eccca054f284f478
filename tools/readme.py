"""Write README.md and its pictures from nbs/index.ipynb; with `--check`, fail if they are outdated.

Text, code and outputs are those saved in the notebook. No code is run.
"""
import json, re, sys
from base64 import b64decode
from functools import cache
from pathlib import Path
try: import tomllib
except ModuleNotFoundError: import tomli as tomllib   # Python 3.10: nbdev, pytest and Sphinx install it

root = Path(__file__).resolve().parent.parent
nb_path = root/'nbs/index.ipynb'
note = '<!-- Written by tools/readme.py from nbs/index.ipynb: edit that. -->'
re_directive = re.compile(r'^\s*#\s*\|\s*(.*)')
hidden = {'hide', 'hide: true', 'include: false'}

@cache
def project():
    "Return the table `[project]` of pyproject.toml: the facts about the package"
    return tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['project']

def project_url(name):
    "Return an address from pyproject.toml, such as that of 'Documentation', without a slash at its end"
    return project()['urls'][name].rstrip('/')

def docs_url():
    "Return the address of the documentation site, without a slash at its end"
    return project_url('Documentation')

def colab_url(path):
    "Return the address that opens the notebook at `path` in Colab"
    repository = project_url('Repository').removeprefix('https://github.com/')
    return f'https://colab.research.google.com/github/{repository}/blob/main/{path}'

def badges():
    "Return the badges of tests and docs for README; the site has none, because it shows nothing from other servers"
    workflows = f'{project_url("Repository")}/actions/workflows'
    def badge(name, file, link): return f'[![{name}]({workflows}/{file}/badge.svg?branch=main)]({link})'
    tests = badge('tests', 'test.yml', f'{workflows}/test.yml')
    return f'{tests} {badge("docs", "docs.yml", docs_url()+"/")}'

def link_pages(text, url):
    "Replace links to notebooks by links to their pages: `guides/01_x.ipynb` becomes `guides/x.html`"
    def page(m):
        *folders,nm = m[1].lower().split('/')
        return f']({"/".join([url, *folders, re.sub(r"^[0-9]+[a-z0-9]*_", "", nm)])}.html'
    return re.sub(r'\]\((?!\w+:)([^)#\s]+)\.ipynb', page, text)

def title(text):
    "Return the text of the first cell without nbdev's settings, which are lines such as `- key: value`"
    return '\n'.join(o for o in text.splitlines() if not o.startswith('- '))

def fence(text, lang=''): return f'```{lang}\n{text.rstrip()}\n```'

def shown(text):
    "Return the text that a terminal shows in the end; of a progress bar, that is the last state"
    return '\n'.join(o.rstrip('\r ').rsplit('\r', 1)[-1] for o in text.split('\n'))

def output(o, alt, image, link):
    "Return an output of a cell as Markdown; `image(data)` gives the address of its picture, `link(text)` adapts links"
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
    "Return a code cell and its outputs as a list of Markdown texts, without nbdev's directives"
    lines = ''.join(cell['source']).splitlines()
    options = [m[1].strip() for m in map(re_directive.match, lines) if m]
    if hidden & set(options): return []
    source = '\n'.join(o for o in lines if not re_directive.match(o)).strip('\n')
    alt = next((o.split(':', 1)[1].strip(' "') for o in options if o.startswith('fig-alt:')), '')
    shows_code = source and not {'code-fold: true','echo: false'}&set(options)
    outputs = [output(o, alt, lambda data: image(cell['id'], data), link) for o in cell['outputs']]
    return [fence(source, 'python'), *outputs] if shows_code else outputs

def markdown(nb, url, image):
    "Return a notebook as Markdown with badges; `image(id, data)` returns the address of the picture of the cell `id`"
    parts = []
    def link(text): return link_pages(text, url)
    for i,c in enumerate(nb['cells']):
        text = ''.join(c['source'])
        if c['cell_type']=='markdown': parts.append(link(text if i else title(text)).strip())
        elif c['cell_type']=='code': parts += code(c, image, link)
    return '\n\n'.join([parts[0], badges(), *parts[1:]]) + '\n'

def main(check=False):
    "Write the files; with `check`, write nothing, and return a message if a file is outdated"
    files = {}
    def image(id, data):
        files[f'images/{id}.png'] = data
        return f'images/{id}.png'
    text = markdown(json.loads(nb_path.read_text(encoding='utf-8')), docs_url(), image)
    files['README.md'] = f'{note}\n\n{text}'.encode()
    for nm,data in files.items():
        fn = root/nm
        if check and (not fn.exists() or fn.read_bytes()!=data):
            return f'{nm} is not in step with nbs/index.ipynb: run `make prepare`'
        fn.parent.mkdir(exist_ok=True)
        if not check: fn.write_bytes(data)

if __name__=='__main__': sys.exit(main('--check' in sys.argv[1:]))
