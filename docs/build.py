"""Write the documentation site to `_docs`: `make docs`.

Each notebook in `nbs/` becomes a page, with the outputs saved in it (`make test` runs them). Its folder says in which
section: modules that users import are the API, those in `core` are how it is built.
What a notebook exports is shown as signature, parameters, errors and a link to the source, with the code folded.
Sphinx renders the pages; a broken link or directive fails.
"""
import ast, builtins, hashlib, inspect, json, os, re, shutil, subprocess, sys
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from fastcore.docments import docments
from fastcore.nbio import mk_cell, new_nb, read_nb, write_nb
from nbdev.doclinks import NbdevLookup, nbglob

here = Path(__file__).resolve().parent
root,site = here.parent,here.parent/'_docs'
sys.path[:0] = [str(root), str(root/'tools')]
import readme

sections = dict(
    tutorials=('Tutorials', 'From the first step to several devices. Each was run on a CPU, and each can be opened '
        'in Colab.'),
    explanations=('Explanations', 'Why it is done so, in pictures of what ran.'),
    guarantees=('Guarantees', 'One promise per page, each proved by running it. '
        'What micro-batches cannot promise is on the [first page](../index.ipynb).'),
    api=('API', 'What you import. Each page begins with the class or function and its parameters; '
        'how it works comes below.'),
    built=('How it is built', 'The modules behind the API, for those who want to know how or to change something. '
        'Each page is the source of its module: prose, code, and examples that are its first tests.'))
wings = ['core']
# the order of the pages, where their numbers or their `order` do not say it; those that are not there are passed over
order = dict(
    tutorials='accumulate vision text language_model tabular segmentation hugging_face choose fit_in_memory '
        'accum_check how_large grow_the_batch mixed_precision watch launch'.split(),
    single='tutorials/index cheat_sheet troubleshooting explanations/index guarantees/index api/index built/index '
        'differences upstream compatibility coming_from changelog contributing'.split(),
    explanations=['network'])

# The names that a notebook exports

empty = inspect.Parameter.empty

def resolve(mod, nm):
    "What `nm` is in `mod`, without what wraps it: `Learner.bs_find` is a function"
    o = mod
    for k in nm.split('.'): o = inspect.getattr_static(o, k) if inspect.isclass(o) else getattr(o, k)
    return inspect.unwrap(getattr(o, 'fget', None) or getattr(o, '__func__', None) or o)

def defined(source):
    "The public names that an exported cell defines, methods after their class as `Class.method`"
    for o in ast.parse(source).body:
        if isinstance(o, ast.ClassDef):
            methods = [m for m in o.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)]
            names = [o.name] + [f'{o.name}.{m.name}' for m in methods]
        elif isinstance(o, ast.FunctionDef):
            patched = any('patch' in ast.unparse(d) for d in o.decorator_list)
            if patched and not ast.get_docstring(o): continue
            names = [f'{ast.unparse(o.args.args[0].annotation)}.{o.name}' if patched else o.name]
        elif isinstance(o, ast.Assign): names = [t.id for t in o.targets if isinstance(t, ast.Name)]
        else: continue
        yield from (nm for nm in names if not re.search(r'(^|\.)_', nm))

def named(o):
    "A default as it is written"
    if isinstance(o, partial):
        args = [*map(named, o.args), *(f'{k}={named(v)}' for k,v in o.keywords.items())]
        return f'partial({", ".join([named(o.func), *args])})'
    return o if isinstance(o, str) and o.isidentifier() and o[0].isupper() else getattr(o, '__name__', None) or repr(o)

def type_name(o):
    "A type as it is written, without the modules it comes from"
    if isinstance(o, str): return o
    if o is None: return 'None'
    name = None if getattr(o, '__args__', None) else getattr(o, '__name__', None)   # not of `int|None` or `list[int]`
    return name or re.sub(r'\b[a-z_]\w*\.', '', repr(o)).replace(' | ', '|').replace('NoneType', 'None')

re_nbdev = re.compile(r'^(?:from nbdev\.showdoc import \*|import nbdev; nbdev\.nbdev_export\(\))\n?', re.M)

def only_imports(source):
    "Is there nothing in it but imports? Magics are no Python"
    try: return all(isinstance(o, (ast.Import,ast.ImportFrom)) for o in ast.parse(source).body)
    except SyntaxError: return False

def hides(options, source):
    """Does the site leave the cell out? Imports are folded, whatever the notebook says: what one pastes needs them.
    tests/run.py runs the pages by the same rule"""
    if 'default_exp' in options: return True
    return 'hide' in options and not (only_imports(source) and ast.parse(re_nbdev.sub('', source)).body)

class Default:
    def __init__(self, o): self.o = o
    def __repr__(self): return named(self.o)

def signature(o):
    "The parameters of `o` with their defaults, in parentheses"
    def bare(p):
        default = p.default if p.default is empty else Default(p.default)
        return str(p.replace(annotation=empty, default=default))
    if inspect.isclass(o) and issubclass(o, BaseException): return ''   # nobody makes one, but who raises it
    return '(' + ', '.join(bare(p) for nm,p in inspect.signature(o).parameters.items() if nm!='self') + ')'

def row(*cells): return '| ' + ' | '.join(str(c).replace('|', r'\|').replace('\n', ' ') for c in cells) + ' |'
def code(s): return f'`{s}`' if s else ''

def link_type(s, link):
    "A type, or each of several, with a link to where it is documented"
    return link(code(s)) if '[' in s else ' | '.join(link(code(o)) for o in s.split('|'))

def grid(head, rows): return '\n'.join(row(*o) for o in (head, ['---']*len(head), *rows)) if rows else ''

def table(o, link):
    "What `o` takes and returns, where that is documented"
    docs,annos = docments(o, full=True, args_kwargs=True),getattr(o, '__annotations__', {})
    if inspect.isclass(o): annos = annos | getattr(o.__init__, '__annotations__', {})
    docs.pop('self', None)
    if not any(d.docment for d in docs.values()): return ''
    rows = []
    for nm,d in docs.items():
        # a default's type may not be all that is allowed
        typ = link_type(type_name(annos[nm]), link) if nm in annos else ''
        default,details = '' if d.default is empty else code(named(d.default)),link(d.docment or '')
        if nm!='return': rows.append((code(nm), typ, default, details))
        elif d.docment: rows.append(('*returns*', typ, '', details))
    return grid(('Name','Type','Default','Details'), rows)

re_error = re.compile(r'([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning)): +(\S.*)')

def split_errors(doc):
    "A docstring without the paragraphs on what is raised, such as `TypeError: it is no number`, and these as pairs"
    text,errors = [],[]
    for i,o in enumerate(re.split(r'\n\s*\n', doc or '')):
        if not (i and re_error.match(o)):
            text.append(o)
            continue
        for line in map(str.strip, o.strip().split('\n')):
            m = re_error.match(line)
            if m: errors.append([m[1], m[2]])
            else: errors[-1][1] += f' {line}'
    return '\n\n'.join(text),errors

def errors_table(mod, nm, errors):
    "What is raised, and when"
    for o,_ in errors:
        top,*rest = o.split('.')
        if top=='torch' and hasattr(sys.modules['torch'], rest[0]): continue
        if any(hasattr(x, top) for x in (mod, builtins, getattr(mod, 'torch', None))): continue
        sys.exit(f'{mod.__name__}.{nm}: there is no {o} in this module')
    return grid(('Errors','When'), [(code(o), when) for o,when in errors])

def entry(mod, nm, link):
    "The reference entry of `nm`: signature, docstring, parameters, errors"
    o,cls = resolve(mod, nm),'.' in nm
    static = inspect.getattr_static(getattr(mod, nm.split('.')[0]), nm.split('.')[-1]) if cls else None
    sig,docs = '',inspect.getdoc(o) if o.__doc__ else ''
    if not (inspect.isclass(o) or inspect.isfunction(o)):
        kind,docs = 'data',f'A {type(o).__name__} with {len(o)} entries.' if hasattr(o, '__len__') else ''
    elif isinstance(static, property): kind = 'property'
    else: kind,sig = 'method' if cls else 'class' if inspect.isclass(o) else 'function',signature(o)
    docs,errors = split_errors(docs)
    own = kind=='class' and '__init__' in vars(o)
    ours = kind=='class' and getattr(o.__init__, '__module__', '').startswith('fastaccum.')   # perhaps inherited
    if own: errors += split_errors(inspect.getdoc(o.__init__))[1]
    params = table(o, link) if kind in ('function','method') or own or ours or hasattr(o, '_fields') else ''
    parts = [docs, params, errors_table(mod, nm, [(e, link(when)) for e,when in errors])]
    anchor = f'<a id="{nm.lower()}"></a>'   # where other projects' nbdev looks for it
    return '\n\n'.join([anchor, f'::::{{py:{kind}}} {nm}{sig}\n:module: {mod.__name__}', *filter(None, parts), '::::'])

# Prose

class Linker:
    "Make the names in prose links: ours to their entry, fastai's to its documentation"
    def __init__(self, names): self.names,self.fastai = names,NbdevLookup(strip_libs=('fastai',))
    def __call__(self, text):
        done = set()
        def link(m):
            nm = m[1]
            if nm in done or not re.search(r'[A-Z_.]', nm): return m[0]
            done.add(nm)
            if nm in self.names: return f'{{py:obj}}`{nm} <{self.names[nm]}>`'
            url = self.fastai.doc(nm) if re.match('[A-Z]', nm) else None
            return f'[`{nm}`]({url})' if url and 'docs.fast.ai' in url else m[0]
        def line(s):
            if s.startswith(('#','```')): return s
            return re.sub(r'(?<![`\[}])`([A-Za-z_][\w.]*)`(?![`\]])', link, s)
        parts = re.split(r'(^```.*?^```$)', text, flags=re.M|re.S)
        return ''.join(o if i%2 else '\n'.join(map(line, o.split('\n'))) for i,o in enumerate(parts))

def page(p):
    "The page of the notebook at `p`, a path within `nbs`: `core/05_mean.ipynb` is `core/mean`"
    *folders,nm = Path(p).with_suffix('').as_posix().lower().split('/')
    return '/'.join([*folders, re.sub(r'^[0-9]+[a-z0-9]*_', '', nm)])

def link_pages(text): return re.sub(r'\]\((?!\w+:)([^)#\s]+)\.ipynb', lambda m: f']({page(m[1])}.ipynb', text)

def split_title(text):
    "The title, the line below it, and nbdev's settings in a page's first cell"
    lines = [o for o in text.splitlines() if o.strip()]
    below = ' '.join(o[2:] for o in lines if o.startswith('> '))
    return lines[0].lstrip('# '),below,dict(o[2:].split(': ', 1) for o in lines if o.startswith('- '))

class Page:
    "A notebook, as a page"
    def __init__(self, path):
        self.path,self.nb = path,read_nb(path)
        self.name = page(path.relative_to(root/'nbs'))
        self.title,self.text,settings = split_title(self.nb.cells[0].source)
        number = re.match('[0-9]+', path.name)
        self.order = float(number[0] if number else settings.get('order', 50))
        self.folder,_,stem = self.name.rpartition('/')
        known = order.get(self.folder, ())
        if self.folder=='tutorials': self.order = known.index(stem) if stem in known else len(known)
        self.cells = []
        for c in self.nb.cells[1:]:
            if c.cell_type=='code':
                c.options = dict(c.directives)
                fold = re.search(r'^#\| *code-fold: *(\w+)', c.source, re.M)   # nbdev takes `true` for a flag
                if fold: c.options['code-fold'] = fold[1]
                c.options['echo'] = not re.search(r'^#\| *echo: *false\b', c.source, re.M)
                c.remove_directives()
            self.cells.append(c)
        exports = [c.options['default_exp'] for c in self.cells if c.cell_type=='code' and 'default_exp' in c.options]
        self.mod = import_module(f'fastaccum.{exports[0]}') if exports else None
        self.section = 'built' if self.folder in wings else 'api' if self.mod else self.folder
        # the wing that it is the first page of
        self.wing = self.folder if self.section=='built' and self.name.endswith('/index') else None

    def __lt__(self, other): return (self.order,self.name)<(other.order,other.name)

    def exported(self): return [c for c in self.cells if c.cell_type=='code' and 'export' in c.options]
    def public(self): return {nm:f'{self.mod.__name__}.{nm}' for c in self.exported() for nm in defined(c.source)}

    def typed(self):
        "What to type to have what the page is about, where its first text does not say so"
        first = next((c.source for c in self.cells if c.cell_type=='markdown'), '')
        if re.search(r'^```python\n(?:.*\n)*?(?:import|from) ', first, re.M): return ''
        names = [nm for nm in self.public() if '.' not in nm]
        top = [nm for nm in names if nm in import_module('fastaccum').__all__]
        where,names = ('fastaccum',top) if top else (self.mod.__name__,names)
        return f'```python\nfrom {where} import {", ".join(names)}\n```' if names else ''

    def linked(self, text):
        "Links to notebooks as links to their pages; where there is no such notebook, that is an error"
        for o in re.findall(r'\]\((?!\w+:)([^)#\s]+\.ipynb)', text):
            if (self.path.parent/o).is_file(): continue
            sys.exit(f'{self.path.relative_to(root)} links to {o}, which is not there')
        return link_pages(text)

    def colab(self):
        "Where a tutorial opens in Colab"
        where = self.path.relative_to(root).as_posix()
        return f'[Open in Colab]({readme.colab_url(where)})' if self.folder=='tutorials' else ''

    def shown(self, link):
        "Its cells for Sphinx"
        typed = f'\n\n{self.typed()}' if self.mod else ''
        colab = f'\n\n{self.colab()}' if self.colab() else ''
        yield mk_cell(f'# {self.title}\n\n{{.lede}}\n{link(self.text)}{colab}{typed}', 'markdown')
        above = None   # imports, and what comes before the first entry: shown, folded, above the next code
        begun = not self.mod
        for c in self.cells:
            if c.cell_type!='code':
                yield mk_cell(maths(self.linked(link(c.source))), 'markdown')
                continue
            opts = c.options
            if hides(opts, c.source): continue
            c.metadata,meta = {},{}
            public = [*defined(c.source)] if 'export' in opts else []
            plumbing = 'export' in opts and not public and not begun
            if plumbing or {'hide','export'} & opts.keys() and only_imports(c.source):
                c.source = re_nbdev.sub('', c.source).strip('\n')
                if above: above.source += f'\n\n{c.source}' if plumbing else f'\n{c.source}'
                else: above = c
                continue
            begun = begun or bool(public)
            for nm in public: yield mk_cell(entry(self.mod, nm, link), 'markdown')
            if above:
                label = 'Show the imports' if only_imports(above.source) else 'Show code'
                above.metadata = dict(tags=['hide-input'], mystnb=dict(code_prompt_show=label))
                yield above
                above = None
            fold = 'export' in opts or str(opts.get('code-fold', self.draws(c))).lower()=='true'
            if fold: c.metadata['tags'] = ['hide-input']
            if not c.options['echo']: c.metadata['tags'] = ['remove-input']
            for o in c.outputs:
                if 'text' in o: o['text'] = readme.shown(''.join(o['text']))
                if 'text/markdown' in o.get('data', {}):
                    o.data['text/markdown'] = self.linked(''.join(o.data['text/markdown']))
                if any(k.startswith('image/') for k in o.get('data', {})): meta['image'] = dict(alt=self.alt(c))
            if meta: c.metadata['mystnb'] = meta
            if c.source or c.outputs: yield c

    def draws(self, c):
        "Is the cell there for the picture or the table below it?"
        kinds = {k for o in c.outputs for k in o.get('data', {})}
        return 'text/markdown' in kinds or 'image/png' in kinds and c.source.count('\n')>3

    def alt(self, c):
        alt = c.options.get('fig-alt', '').strip('"')
        if not alt:
            sys.exit(f'{self.path.relative_to(root)}: the picture of cell {c.id} needs a text for those '
                'who do not see it: #| fig-alt: ...')
        return alt

    def markdown(self):
        "The page as Markdown, its pictures in files next to it"
        def image(id, data):
            fn = site/f'{self.name}_files/{id}.png'
            fn.parent.mkdir(parents=True, exist_ok=True)
            fn.write_bytes(data)
            return f'{readme.docs_url()}/{self.name}_files/{id}.png'
        nb = json.loads(self.path.read_text(encoding='utf-8'))
        return readme.markdown(nb, readme.docs_url(), image, folder=self.folder)

# The site

def braced(text):
    "Arguments of `\\frac` and `\\sqrt` in braces: matplotlib wants them"
    arg = r'\s*(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\\[A-Za-z]+|[^\s{])'
    def full(o): return o if o.startswith('{') else f'{{{o}}}'
    text = re.sub(r'\\frac'+arg+arg, lambda m: fr'\frac{full(m[1])}{full(m[2])}', text)
    return re.sub(r'\\sqrt'+arg, lambda m: fr'\sqrt{full(m[1])}', text)

def tex(m):
    """A formula as a picture in the text, in the text's colour: no script from elsewhere is needed, and it is read
    aloud as it is written"""
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser
    from matplotlib.textpath import TextPath
    block,written = m[1] is not None,(m[1] or m[2]).strip()
    text = braced(re.sub(r'\\text\b', r'\\mathrm', ' '.join(written.split())).replace('…', r'\ldots '))
    text = text.replace(r'\qquad', r'\quad\quad').replace(r'\frac', r'\dfrac' if block else r'\frac')
    font = FontProperties(family='DejaVu Sans', math_fontfamily='stix', size=18)
    path = TextPath((0,0), f'${text}$', prop=font)
    width,height,depth,*_ = MathTextParser('path').parse(f'${text}$', 72, font)
    names = {1:'M', 2:'L', 3:'Q', 4:'C', 79:'Z'}
    d = ''.join(names[k] + ('' if k==79 else ' '.join(f'{x:.1f} {-y:.1f}' for x,y in v.reshape(-1, 2)))
        for v,k in path.iter_segments(simplify=False))
    said = written.replace('&', '&amp;').replace('"', '&quot;').replace('<', '&lt;')
    svg = (f'<svg class="math" role="img" aria-label="{said}" viewBox="0 {-height:.1f} {width:.1f} {height+depth:.1f}" '
        f'style="height:{(height+depth)/18:.2f}em;vertical-align:{-depth/18:.2f}em"><path d="{d}"/></svg>')
    return f'\n\n<p class="math">{svg}</p>\n\n' if block else svg

def maths(text):
    "The text with its formulas drawn, but for what is code"
    parts = re.split(r'(^```.*?^```$|`[^`]*`)', text, flags=re.M|re.S)
    found = r'\$\$(.+?)\$\$|\$([^$\n]+)\$'
    return ''.join(o if i%2 else re.sub(found, tex, o, flags=re.S) for i,o in enumerate(parts))

def toctree(names): return '\n'.join(['```{toctree}', ':hidden:', ':titlesonly:', '', *names, '```'])

def contents(pages, link):
    "What is on each of the pages"
    def names(p):
        public = p.public() if p.mod else {}
        own = {nm:full for nm,full in public.items() if nm.rpartition('.')[0] not in public}   # no methods of these
        return ', '.join(f'{{py:obj}}`{nm} <{full}>`' for nm,full in own.items())
    return '\n'.join(f'[{p.title}](/{p.name}.ipynb)\n: {link(p.text)}\n\n  {names(p)}\n' for p in pages)

def rooms(pages, link):
    "What is in each of the wings"
    def room(p):
        inside = [f'[{o.title}](/{o.name}.ipynb)' for o in pages if o.folder==p.wing and not o.wing]
        return f'[{p.title}](/{p.name}.ipynb)\n: {link(p.text)}\n\n  {", ".join(inside)}\n'
    return '\n'.join(room(p) for p in pages if p.wing)

def landing(title, text, pages, link):
    "The first page of a section: what there is in it"
    first = [p for p in pages if p.wing] or pages
    listed = rooms(pages, link) if first!=pages else contents(pages, link)
    return f'# {title}\n\n{{.lede}}\n{link_pages(text)}\n\n{listed}\n{toctree(f"/{p.name}" for p in first)}'

def sources():
    "What the site is made of"
    cmd = ['git','ls-files','-co','--exclude-standard','nbs','fastaccum','docs','tools','*.md','*.toml','*.ini']
    names = subprocess.run(cmd, cwd=root, capture_output=True, text=True)
    return [root/o for o in sorted(names.stdout.split('\n')) if o and (root/o).is_file()]

def fingerprint():
    "Changes when the site should be built again"
    return hashlib.sha256(b''.join(o.name.encode()+o.read_bytes() for o in sources())).hexdigest()

def stage(src, pages):
    "Write what Sphinx reads to `src`"
    names = {k:v for p in pages if p.mod for k,v in p.public().items()}
    link = Linker(names)
    def put(nm, text):
        (src/nm).parent.mkdir(parents=True, exist_ok=True)
        (src/nm).write_text(text, encoding='utf-8')
    for k,(title,text) in sections.items():
        put(f'{k}/index.md', landing(title, text, [p for p in pages if p.section==k], link))
    def top(): return [o for o in order['single'] if any((src/f'{o}.{ext}').exists() for ext in ('ipynb','md'))]
    for nm in ('CHANGELOG','CONTRIBUTING'):
        text = (root/f'{nm}.md').read_text(encoding='utf-8')
        put(f'{nm.lower()}.md', re.sub(re.escape(readme.docs_url())+r'/([\w/]+)\.html', r'\1.ipynb', text))
    for p in pages:
        cells = list(p.shown(link))
        if p.name=='index': cells.append(mk_cell(toctree(top()), 'markdown'))
        if p.wing:
            inside = [o for o in pages if o.folder==p.wing and o is not p]
            listed = f'{contents(inside, link)}\n{toctree(f"/{o.name}" for o in inside)}'
            cells.append(mk_cell(f'## The pages\n\n{listed}', 'markdown'))
        (src/p.name).parent.mkdir(parents=True, exist_ok=True)
        meta = dict(language_info=dict(name='python', pygments_lexer='ipython3'))
        write_nb(new_nb(cells, meta=meta), src/f'{p.name}.ipynb')
    (src/'names.json').write_text(json.dumps(names))

def main():
    os.environ['IN_TEST'] = '1'   # no cell exports the library
    os.chdir(root)
    pages = sorted(map(Page, nbglob(root/'nbs', as_path=True)))
    pages.sort(key=lambda p: p.name=='index')   # it lists what is there
    with TemporaryDirectory() as tmp:
        src,out = Path(tmp)/'pages',Path(tmp)/'site'
        stage(src, pages)
        sphinx = [sys.executable, '-W', 'ignore', '-m', 'sphinx', '-qW', '--keep-going']
        rc = subprocess.call([*sphinx, '-c', here, '-d', Path(tmp)/'doctrees', src, out])
        if rc: return rc
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(out, site)
        shutil.copy(src/'names.json', site)
    for p in pages: (site/f'{p.name}.html.md').write_text(p.markdown(), encoding='utf-8')
    (site/'.fingerprint').write_text(fingerprint())
    print(f'{len(pages)+len(sections)+2} pages in {site.name}')

if __name__=='__main__': sys.exit(main())
