"""Write the documentation site to `_docs`: `make docs`.

Each notebook in `nbs/` becomes a page, with the outputs saved in it (`make test` runs them). Guides and the like are
for users, what is in `contribute`, and the modules, for contributors, who have a menu of their own. A module that
users import has two pages: for users its entry (signature, parameters, errors) with the sections of its notebook that
`user_sections` names, for contributors the whole notebook.
Sphinx renders the pages; a broken link or directive fails.
"""
import ast, builtins, hashlib, inspect, json, os, re, shutil, subprocess, sys
from copy import deepcopy
from functools import partial
from html import unescape
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

from fastcore.docments import docments
from fastcore.nbio import mk_cell, new_nb, read_nb, write_nb
from nbdev.doclinks import NbdevLookup, nbglob

here = Path(__file__).resolve().parent
root,site = here.parent,here.parent/'_docs'
sys.path[:0] = [str(root), str(root/'tools')]
import fastaccum, messages, readme
from pasted import hides, only_imports, re_nbdev

# the pages in their order; a notebook that is not named here is an error
menu = {
    'Data and models': ('guides', 'images segmentation text hugging_face tables'),
    'Memory and speed': ('guides', 'out_of_memory mixed_precision several_gpus'),
    'Matching the full batch': ('guides', 'check_your_run batchnorm whole_batch_losses custom_losses'),
    'Training': ('guides', 'learning_rate growing_batches logging save_and_resume'),
    'Reference': ('reference', 'cheat_sheet faq messages warnings'),   # a page with entries is listed below the API
    'About': ('about', 'should_i_accumulate how_exact compared switching works_with'),
    'Contribute': ('contribute', 'architecture callbacks testing benchmarks faults_of_fastai')}
order = [f'{folder}/{o}' for folder,names in menu.values() for o in names.split()]
# titles that are too long for the menu
short = {'guides/growing_batches':'Growing batches',
    'guides/learning_rate':'Learning rate', 'schedule':'Schedules', 'wandb':'WandbCallback'}
# messages whose title is the subject of a guide, which the search finds first
guided = {'batchnorm':'BatchNorm', 'out-of-memory':'Out of memory'}
user_sections = ('Why','One step, event by event','Examples','Caveats')
api = ('API', 'One page for each thing you import: parameters, errors, examples, caveats.')
modules = ('Modules', 'The source, a page for each module, in the order in which one reads them: prose, code, and '
    'examples that are its first tests.')

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

class Default:
    def __init__(self, o): self.o = o
    def __repr__(self): return named(self.o)

def signature(o):
    "The parameters of `o` with their defaults, in parentheses"
    def bare(p):
        default = p.default if p.default is empty else Default(p.default)
        return str(p.replace(annotation=empty, default=default))
    if inspect.isclass(o) and issubclass(o, BaseException): return ''   # nobody makes one, but who raises it
    ps = [p for nm,p in inspect.signature(o).parameters.items() if nm!='self']
    parts = [bare(p) for p in ps]
    keyword = [p.kind==p.KEYWORD_ONLY for p in ps]
    if any(keyword) and not any(p.kind==p.VAR_POSITIONAL for p in ps): parts.insert(keyword.index(True), '*')
    return f'({", ".join(parts)})'

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

def entry(mod, nm, link, again=False):
    "The reference entry of `nm`: signature, docstring, parameters, errors; `again` where another page has it, too"
    o,cls = resolve(mod, nm),'.' in nm
    static = inspect.getattr_static(getattr(mod, nm.split('.')[0]), nm.split('.')[-1]) if cls else None
    sig,docs = '',inspect.getdoc(o) if o.__doc__ else ''
    if not (inspect.isclass(o) or inspect.isfunction(o)):
        kind,docs = 'data',f'A {type(o).__name__} with {len(o)} entries.' if hasattr(o, '__len__') else ''
    elif isinstance(static, property): kind = 'property'
    else: kind,sig = 'method' if cls else 'class' if inspect.isclass(o) else 'function',signature(o)
    docs,errors = split_errors(docs)
    own = kind=='class' and '__init__' in vars(o)
    if own: errors += split_errors(inspect.getdoc(o.__init__))[1]
    params = table(o, link) if kind in ('function','method','class') else ''
    parts = [docs, params, errors_table(mod, nm, [(e, link(when)) for e,when in errors])]
    anchor = f'<a id="{nm.lower()}"></a>'   # where other projects' nbdev looks for it
    options = f':module: {mod.__name__}' + '\n:no-index:'*again
    return '\n\n'.join([anchor, f'::::{{py:{kind}}} {nm}{sig}\n{options}', *filter(None, parts), '::::'])

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

def split_title(text):
    "The title, the line below it, and nbdev's settings in a page's first cell"
    lines = [o for o in text.splitlines() if o.strip()]
    below = ' '.join(o[2:] for o in lines if o.startswith('> '))
    return lines[0].lstrip('# '),below,dict(o[2:].split(': ', 1) for o in lines if o.startswith('- '))

class Page:
    "A notebook, as a page"
    elsewhere = {}   # names of modules for contributors that have their entry on a page for users: name -> page
    def __init__(self, path):
        self.path,self.nb = path,read_nb(path)
        self.name = page(path.relative_to(root/'nbs'))
        self.title,self.text,settings = split_title(self.nb.cells[0].source)
        number = re.match('[0-9]+', path.name)
        keywords = [o.strip().partition('#') for o in settings.get('keywords', '').split(',') if o.strip()]
        self.keywords = {o: anchor for o,_,anchor in keywords}   # with the section that answers, or ''
        # names that users meet, though they do not import them; or whose entries a page without a module has
        self.more = settings.get('api', '').split()
        self.inner = {*settings.get('inner', '').split()}   # methods that are public, and no users'
        self.folder = self.name.rpartition('/')[0]
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
        top = self.name in ('index','get_started')
        if not (self.mod or top or self.name in order):
            sys.exit(f'{path.relative_to(root)}: give the page a place in `menu`, in docs/build.py')
        self.order = float(number[0]) if number else 0 if top else order.index(self.name)

    def answers(self):
        "Its keywords, each with the anchor and the heading of the section that answers, or with two empty texts"
        text = '\n'.join(c.source for c in self.cells if c.cell_type=='markdown')
        heads = {re.sub(r'[^\w -]', '', o).lower().replace(' ', '-'): o for o in re.findall('^##+ (.+)$', text, re.M)}
        for o,anchor in self.keywords.items():
            if anchor and anchor not in heads: sys.exit(f'{self.path.relative_to(root)}: there is no section #{anchor}')
        words = dict(self.keywords)
        if self.name=='reference/messages':   # each is found by its title, unless that is the subject of a guide
            mine = messages.anchors(text)
            heads |= mine
            words |= {k.replace('-', ' '): k for k in mine if k not in guided}
        return [[o,f'#{anchor}'*bool(anchor),heads.get(anchor, '')] for o,anchor in words.items()]

    @property
    def is_api(self):
        "Do users import something from this module?"
        return self.mod and not self.folder and any(self.in_section(('Examples','Caveats')))
    @property
    def doc(self):
        "Its page with all of its cells, which is for contributors if it is a module"
        return f'modules/{self.name}' if self.is_api else self.name

    def in_section(self, names):
        "Of each cell, whether it is in one of the sections of these names"
        within = False
        for c in self.cells:
            head = re.match('## (.+)', c.source) if c.cell_type=='markdown' else None
            if head: within = head[1].strip() in names
            yield within

    def __lt__(self, other): return (self.order,self.name)<(other.order,other.name)

    def exported(self): return [c for c in self.cells if c.cell_type=='code' and 'export' in c.options]
    def public(self): return {nm:f'{self.mod.__name__}.{nm}' for c in self.exported() for nm in defined(c.source)}
    def told(self):
        "The names that its API page has entries for"
        if not self.mod: return self.more
        if not self.is_api: return []
        ours = {*fastaccum.__all__, 'Learner', *self.more}
        names = [nm for nm in self.public() if not re.search(r'\.(before|after)_', nm)]
        names = [nm for nm in names if '.' not in nm or nm.rpartition('.')[2] not in self.inner]
        return [nm for nm in names if {nm, nm.partition('.')[0]}&ours]
    def typed_names(self):
        "Those of them that users type: no methods of the others"
        return [nm.replace('Learner.', 'learn.') for nm in self.told() if '.' not in nm or nm.startswith('Learner.')]

    def typed(self):
        "What to type to have what the page is about, where its first text does not say so"
        first = next((c.source for c in self.cells if c.cell_type=='markdown'), '')
        if re.search(r'^```python\n(?:.*\n)*?(?:import|from) ', first, re.M): return ''
        names = [nm for nm in self.public() if '.' not in nm] if self.mod else self.more
        if not names: return ''
        top = [nm for nm in names if nm in fastaccum.__all__]
        where,names = ('fastaccum',top) if top else (self.mod.__name__,names)
        return f'```python\nfrom {where} import {", ".join(names)}\n```'

    def usage(self):
        "What the first text of a module says to type, below the import"
        first = next((c.source for c in self.cells if c.cell_type=='markdown'), '')
        block,typed = re.search(r'^```python\n(.*?)^```', first, re.M|re.S),self.typed()
        above = typed.removesuffix('```')+'\n' if typed else '```python\n'
        return f'{above}{block[1]}```' if block else typed

    def linked(self, text):
        "Links to notebooks as links to their pages; where there is no such notebook, that is an error"
        def link(m):
            fn = (self.path.parent/f'{m[1]}.ipynb').resolve()
            if not fn.is_file(): sys.exit(f'{self.path.relative_to(root)} links to {m[1]}.ipynb, which is not there')
            return f'](/{page(fn.relative_to(root/"nbs"))}.ipynb'
        return re.sub(r'\]\((?!\w+:)([^)#\s]+)\.ipynb', link, text)

    def colab(self):
        "The address where a tutorial opens in Colab"
        where = self.path.relative_to(root).as_posix()
        guide = self.folder=='guides' or self.name=='get_started'
        return readme.colab_url(where) if guide else ''

    def head(self, link, title, typed=''):
        "Its title, the line below it, and what to type"
        typed = f'\n\n{typed}' if typed else ''
        words = [o for k in self.keywords for o in k.lower().split()]
        if self.name=='reference/messages':   # it shows their beginnings, and the search knows all of their words
            words += re.findall(r'\w+', ' '.join(o.text for o in messages.messages() if o.key).lower())
        words = ', '.join(dict.fromkeys(words))
        meta = f'```{{eval-rst}}\n.. meta::\n   :keywords: {words}\n```\n\n' if words else ''
        return mk_cell(f'{meta}# {title}\n\n{{.lede}}\n{link(self.text)}{typed}', 'markdown')

    def api(self, link):
        "The cells of its API page for Sphinx"
        names = self.typed_names()
        main = [o for o in names if o not in self.more] or names   # what these return has its entry, not the title
        yield self.head(link, ', '.join(main), self.usage())
        for nm in self.told(): yield mk_cell(entry(self.mod, nm, link), 'markdown')
        cells = [c for c,mine in zip(self.cells, self.in_section(user_sections)) if mine]
        yield from self.cells_shown(link, cells)
        where = f'/{self.doc}.ipynb'
        text = f"How it is built, with all examples: the [module's page]({where}), for contributors."
        yield mk_cell(text, 'markdown')

    def shown(self, link):
        "All of its cells for Sphinx"
        yield self.head(link, self.title, self.typed())
        yield from self.cells_shown(link, self.cells)

    def cells_shown(self, link, cells):
        told,todo = {*self.told(), *self.elsewhere},[] if self.mod else [*self.more]
        above = None   # imports, and what comes before the first entry: shown, folded, above the next code
        begun = not self.mod
        for c in cells:
            if c.cell_type!='code':
                yield mk_cell(maths(self.linked(link(c.source))), 'markdown')
                for nm in [o for o in todo if f'`{o}`' in c.source]:   # below the text that names it first
                    todo.remove(nm)
                    yield mk_cell(entry(import_module(getattr(fastaccum, nm).__module__), nm, link), 'markdown')
                continue
            c = deepcopy(c)   # a module's cells are on two pages
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
            for nm in public: yield mk_cell(entry(self.mod, nm, link, again=nm in told), 'markdown')
            if above:
                label = 'Show the imports' if only_imports(above.source) else 'Show code'
                above.metadata = dict(tags=['hide-input'], mystnb=dict(code_prompt_show=label))
                yield above
                above = None
            fold = 'export' in opts or str(opts.get('code-fold', self.draws(c))).lower()=='true'
            if fold: c.metadata['tags'] = ['hide-input']
            if fold and not c.outputs: meta['code_prompt_show'] = 'Show the code that is used below'
            if not c.options['echo']: c.metadata['tags'] = ['remove-input']
            for o in c.outputs:
                if 'text' in o: o['text'] = readme.shown(''.join(o['text']))
                if max(map(len, o.get('text', '').splitlines()), default=0)>200: o['name'] = 'stderr'   # prose, to wrap
                if 'text/markdown' in o.get('data', {}):
                    o.data['text/markdown'] = self.linked(''.join(o.data['text/markdown']))
                if any(k.startswith('image/') for k in o.get('data', {})):
                    meta['image'] = dict(alt=self.alt(c), classes='photo' if 'photo' in opts else 'plot')
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

def toctree(names, caption=''):
    more = [f':caption: {caption}']*bool(caption)
    def entry(o): return f'{short[o[1:]]} <{o}>' if o[1:] in short else o
    return '\n'.join(['```{toctree}', ':hidden:', ':titlesonly:', *more, '', *map(entry, names), '```'])

def contents(pages, names, where):
    "What is on each of the pages: the names of its entries, below the module's where that is what it is about"
    def item(p):
        listed = ', '.join(map(code, names(p)))
        if not where(p)==p.doc: return f'[{listed}](/{where(p)}.ipynb)\n: {p.text}\n'
        return f'[{p.title}](/{where(p)}.ipynb)\n: {p.text}\n\n  {listed}\n'
    return '\n'.join(map(item, pages))

def landing(title, text, pages, names, where):
    "The first page of a section: what there is in it"
    tree = toctree(f'/{where(p)}' for p in pages)
    return f'# {title}\n\n{{.lede}}\n{text}\n\n{contents(pages, names, where)}\n{tree}'

def least_width(cells):
    "How narrow a column can be, about, in pixels on a phone: words are not broken"
    def width(cell):
        code = ' '.join(re.findall(r'<code.*?</code>', cell, re.S))
        words = [re.split(r'\s+|(?<=-)', unescape(re.sub('<.*?>', '', o))) for o in (cell, code)]
        return max(max(map(len, o))*px for o,px in zip(words, (7.2,8)))
    return max(60, 14+max(map(width, cells)))

def labelled(html):
    """With what stands above its column in each cell of a table. On a phone the rows of one that is too wide are
    stacked"""
    def put(m):
        head,_,body = m[0].partition('</thead>')
        rows = re.findall(r'<tr\b.*?</tr>', m[0], re.S)
        columns = [*zip_longest(*(re.findall(r'<t[hd]\b[^>]*>(.*?)</t[hd]>', o, re.S) for o in rows), fillvalue='')]
        heads = [re.sub('<.*?>', '', o[0]).strip() for o in columns]
        def cells(row):
            at = iter(heads)
            def label(m):
                said = re.sub('<.*?>', '', m[3]).strip()
                mark = {'':' data-empty', '✓':' data-mark="yes"', '✗':' data-mark="no"'}.get(said[:1], '')
                return f'<{m[1]} data-label="{next(at, "")}"{mark}{m[2]}>{m[3]}</{m[1]}>'
            return re.sub(r'<(t[hd])\b([^>]*)>(.*?)</\1>', label, row[0], flags=re.S)
        body = re.sub(r'<tr\b.*?</tr>', cells, body, flags=re.S)
        if sum(map(least_width, columns))>340: head = head.replace('class="', 'class="stacked ', 1)
        return f'{head}</thead>{body}'
    return re.sub(r'<table [^>]*class="(?:docutils|dataframe).*?</table>', put, html, flags=re.S)

def with_colab(html, url):
    "With a link to Colab below its first line. Not in the text: the search would find each page that has the link"
    to = f'\\1\n<p><a class="reference external" href="{url}">Open in Colab</a></p>'
    return re.sub(r'(<p class="lede">.*?</p>)', to, html, count=1, flags=re.S)

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
    own = {p: p.public() if p.mod else {} for p in pages}
    names = {k:v for d in own.values() for k,v in d.items()}
    link = Linker(names)
    def put(nm, text):
        (src/nm).parent.mkdir(parents=True, exist_ok=True)
        (src/nm).write_text(text, encoding='utf-8')
    def put_nb(nm, cells):
        (src/nm).parent.mkdir(parents=True, exist_ok=True)
        meta = dict(language_info=dict(name='python', pygments_lexer='ipython3'))
        write_nb(new_nb(list(cells), meta=meta), src/f'{nm}.ipynb')
    for nm,where in dict(CHANGELOG='changelog', CONTRIBUTING='contribute/index').items():
        text = (root/f'{nm}.md').read_text(encoding='utf-8')
        text = re.sub(re.escape(readme.docs_url())+r'/([\w/]+)\.html', r'/\1.ipynb', text)
        if where!='changelog':
            tree = [f'/{o}' for o in order if o.startswith('contribute/') and o in {p.name for p in pages}]
            text = f'---\norphan: true\n---\n{text}\n\n{toctree([*tree,"/modules/index"])}'
        put(f'{where}.md', text)
    Page.elsewhere = {nm:p.name for p in pages if not p.mod for nm in p.more}
    users = [p for p in pages if p.is_api or not p.mod and p.more]
    mods = sorted((p for p in pages if p.mod), key=lambda p: (p.folder,p))
    put('reference/api.md', landing(*api, users, Page.typed_names, lambda p: p.name))
    put('modules/index.md', landing(*modules, mods, lambda p: [nm for nm in own[p] if '.' not in nm], lambda p: p.doc))
    for p in pages:
        cells = list(p.shown(link))
        if p.name=='index':
            there,first = {o.name for o in pages if not o.more},['/get_started','/about/should_i_accumulate']
            trees = [toctree(first)]
            for caption,(folder,found) in menu.items():
                listed = [f'/{folder}/{o}' for o in found.split() if f'{folder}/{o}' in there]
                listed = [o for o in listed if o not in first]
                listed += dict(Reference=['/reference/api'], About=['/changelog']).get(caption, [])
                if caption!='Contribute': trees.append(toctree(listed, caption))
            cells.append(mk_cell('\n\n'.join(trees), 'markdown'))
        put_nb(p.doc, cells)
        if p.is_api: put_nb(p.name, p.api(link))
    entries = {nm:p.name if nm in p.told() else p.doc for p in mods for nm in own[p]} | Page.elsewhere
    (src/'names.json').write_text(json.dumps({nm:[names[nm],entries[nm]] for nm in names}))
    inner = [('Contribute','contribute/index'), *((p.title,p.name) for p in pages if p.folder=='contribute'),
        ('Modules','modules/index'), *((p.title,p.doc) for p in mods)]
    (src/'inner.json').write_text(json.dumps(inner))
    answers = {p.name:p.answers() for p in pages if p.keywords}
    heads = {a[1:]: o for _,a,o in answers['reference/messages'] if a} | guided
    said = [[o.text, f'#{o.key}', heads[o.key]] for o in messages.messages() if o.key]
    (src/'scorer.js').write_text(scorer % (json.dumps(answers), json.dumps(said)))

# What people type in the search, and the page that answers; Sphinx asks this for the score of each result
scorer = """const typed = () => window.asked || new URLSearchParams(location.search).get("q") || "";
const lower = (o) => o.toLowerCase().trim();
const keywords = %s;
// what the package says, without what is of a run: a few words of it lead to its entry
const bare = (o) => ` ${lower(o).replace(/[^a-z_]+/g, " ").trim()} `;
const said = %s.map(([o, ...to]) => [bare(o), ...to]);
const quoted = () => bare(typed()).split(" ").length > 3 && said.find(([o]) => o.includes(bare(typed())));
// CLIP is a model, and what clips are gradients: as it is written comes first
const named = ([o]) => o === typed().trim() ? 1000 : lower(o) === lower(typed()) ? 900 : 0;
// two words or more, in any order, of one keyword
const words = (o) => lower(o).split(/\\s+/);
const within = ([o]) => words(typed()).length > 1 && words(typed()).every((w) => words(o).includes(w));
var Scorer = {
  score: (result) => {
    const [doc, title, anchor, descr, score] = result;
    const exact = anchor ? null : (keywords[doc] || []).find(named) || (keywords[doc] || []).find(within);
    const found = exact || (!anchor && doc === "reference/messages" && quoted());
    if (found && found[1]) { result[1] = `${title} > ${found[2]}`; result[2] = found[1]; }   // to the section
    return score + (exact ? named(exact) || 850 : found ? 800 : 0) + (/^(guides|get_started|about)/.test(doc) ? 10 : 0)
      + (doc === "changelog" ? -20 : /^(reference\\/messages|about\\/compared)$/.test(doc) ? -20 : 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
"""

# A word that is searched for is a whole word or its beginning: what Sphinx's scripts say, and instead of it.
# Where no word stands in the text, because it is a keyword, the page's beginning is shown; title and button never are
escape = r'.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")'
from_the_beginning = {
    'searchtools.js': {'const escapedWord = _escapeRegExp(word)': 'const escapedWord = "^" + _escapeRegExp(word)',
        'textLower.indexOf(k.toLowerCase())': f'textLower.search("(?<!\\\\w)" + k.toLowerCase(){escape})',
        "match any documents. Please make sure that all words are spelled correctly and that you've selected enough "
            'categories.': 'match any page. Try other words, or the FAQ, Messages or the cheat sheet.',
        '".headerlink", "script"': '".headerlink", "article h1", "p:has(> a[href*=colab])", "script"',
        '.slice(-1)[0];\n    const startWithContext': '.slice(-1)[0] || 0;\n    const startWithContext'},
    'sphinx_highlight.js': {'val.toLowerCase().indexOf(text)':
        f'val.toLowerCase().search("(?<!\\\\w)" + text{escape})'}}

# Sphinx finds pages that have all words, so an error that somebody pastes finds none: then those that have most of them
with_most_words = """
const strict = Search._performSearch;
Search._performSearch = (query, terms, excluded, ...rest) => {
  const found = strict(query, terms, excluded, ...rest);
  if (found.length || terms.size < 2) return found;
  const pages = new Map();   // a result, and how many of the words it has
  for (const term of terms)
    for (const result of strict(term, new Set([term]), excluded, new Set([term]), new Set([term]))) {
      const [best, n] = pages.get(result[0]) || [result, 0];
      pages.set(result[0], [result[4] > best[4] ? result : best, n + 1]);
    }
  return [...pages.values()].sort(([a, n], [b, m]) => n - m || a[4] - b[4]).map(([result]) => result);   // best last
};
"""

def main():
    os.environ['IN_TEST'] = '1'   # no cell exports the library
    os.chdir(root)
    pages = sorted(map(Page, nbglob(root/'nbs', as_path=True)))
    pages.sort(key=lambda p: p.name=='index')   # it lists what is there
    with TemporaryDirectory() as tmp:
        src,out = Path(tmp)/'pages',Path(tmp)/'site'
        stage(src, pages)
        sphinx = [sys.executable, '-W', 'ignore', '-m', 'sphinx', '-qW', '--keep-going']
        settings = ['-c', here, '-d', Path(tmp)/'doctrees', '-D', f'html_search_scorer={src/"scorer.js"}']
        rc = subprocess.call([*sphinx, *settings, src, out])
        if rc: return rc
        made = list(out.rglob('*.html'))
        urls = {out/f'{p.name}.html': p.colab() for p in pages if p.colab()}
        for fn in made:
            html = labelled(fn.read_text(encoding='utf-8'))
            fn.write_text(with_colab(html, urls[fn]) if fn in urls else html, encoding='utf-8')
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(out, site)
        shutil.copy(src/'names.json', site)
    for p in pages: (site/f'{p.name}.html.md').write_text(p.markdown(), encoding='utf-8')
    for nm,changes in from_the_beginning.items():
        text = (site/'_static'/nm).read_text(encoding='utf-8')
        for old,new in changes.items():
            if text.count(old)!=1: sys.exit(f'{nm} of this Sphinx has not the line {old}')
            text = text.replace(old, new)
        if nm=='searchtools.js': text += with_most_words
        (site/'_static'/nm).write_text(text, encoding='utf-8')
    (site/'.fingerprint').write_text(fingerprint())
    print(f'{len(made)} pages in {site.name}')

if __name__=='__main__': sys.exit(main())
