"""Write the documentation site to `_docs`: `make docs`.

Each notebook in `nbs/` becomes a page, with the outputs that are saved in it. A module that users import has two
pages: one for users, with reference entries and the sections in `user_sections`, and one for contributors, with the
whole notebook. The pages for contributors have their own menu, and are not in the search. A broken link is an error.

For tools that read documentation, each page `x.html` is also there as Markdown, `x.html.md`. `llms.txt` lists the
pages, and `SKILL.md` tells an assistant how to use the package.
"""
import ast, inspect, json, re, shutil, sys
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from fastcore.docments import docments
from fastcore.nbio import mk_cell, new_nb, read_nb, write_nb
from nbdev.config import get_config
from nbdev.doclinks import nbglob, patch_name

here = Path(__file__).resolve().parent
root = here.parent
site = root/'_docs'
sys.path[:0] = [str(root), str(root/'tools')]
import fastaccum, messages, readme
from pasted import hides, only_imports, re_nbdev

# the pages of each part of the menu, in order. Sphinx fails if a page for users is missing here
menu = {
    '': 'get_started',
    'Data and models': 'guides/images guides/segmentation guides/text guides/hugging_face',
    'Memory and speed': 'guides/out_of_memory guides/mixed_precision guides/several_gpus',
    'Matching the full batch': 'guides/check_your_run guides/batchnorm guides/whole_batch_losses guides/custom_losses',
    'Training': 'guides/learning_rate guides/growing_batches guides/last_batch guides/logging guides/save_and_resume',
    'Reference': 'reference/cheat_sheet reference/faq reference/messages reference/api',
    'About': 'about/how_exact about/compared about/switching about/works_with changelog'}
# the pages of the API, as its page and the menu group them. A page that is in `menu`, too, has entries of names
api_groups = {
    'Accumulate': 'accumulation schedule token_budget guides/out_of_memory',
    'See the whole batch': 'cache checkpoint batchnorm',
    'Check and measure': 'accum_check bs_find accum_find noise_scale',
    'Learning rates, logs and warnings': 'scaled_lr wandb reference/messages'}
# the folders of modules that users do not import, in reading order, with their titles in the contributors' menu
rooms = {'base': 'base: messages, arguments', 'restore': 'restore: put back', 'step': 'step: compute',
    'whole': 'whole: a batch at once', 'tell': 'tell: describe, refuse, warn', 'check': 'check: compare, explain'}
contribute = ('architecture', 'callbacks', 'testing', 'benchmarks', 'faults_of_fastai')
order = [*' '.join(menu.values()).split(), *(f'contribute/{nm}' for nm in contribute)]
# shorter titles for the menu
short_titles = {'guides/growing_batches':'Growing batches', 'guides/learning_rate':'Learning rate',
    'schedule':'Schedules', 'wandb':'WandbCallback'}
# pages that are part of another one now, and the section that old links lead to
moved = {'guides/tables': 'guides/batchnorm.html#tables',
    'about/should_i_accumulate': 'get_started.html#should-i-accumulate',
    'reference/auto_size': 'guides/out_of_memory.html#other-types-of-batches',
    'reference/warnings': 'reference/messages.html#silence-a-warning-or-turn-it-into-an-error'}
# what fastai leaves out or says wrongly of parameters that a class inherits from it
inherited_details = {'WandbCallback': dict(
    model_name='Name of the file of the model, instead of the name that `SaveModelCallback` has',
    reorder='Whether to put predictions back into the order of the dataset, if `valid_dl` sorts its samples')}
user_sections = ('Why', 'One step, event by event', 'Examples', 'Caveats')

# Reference entries

def resolve(mod, nm):
    "Return the object `nm` of the module `mod` without wrappers: of `Learner.bs_find`, the function"
    o = mod
    for part in nm.split('.'): o = inspect.getattr_static(o, part) if inspect.isclass(o) else getattr(o, part)
    return inspect.unwrap(getattr(o, 'fget', None) or getattr(o, '__func__', None) or o)

def defined(source):
    "Return the public names that an exported cell defines; methods with a docstring are `Class.method`"
    names = []
    for o in ast.parse(source).body:
        if isinstance(o, ast.Assign): names += [target.id for target in o.targets if isinstance(target, ast.Name)]
        if isinstance(o, ast.FunctionDef):
            name = patch_name(o)
            if '.' not in name or ast.get_docstring(o): names.append(name)
        if isinstance(o, ast.ClassDef):
            methods = [m for m in o.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)]
            names += [o.name, *(f'{o.name}.{m.name}' for m in methods)]
    return [nm for nm in names if not re.search(r'(^|\.)_', nm)]

def written(o):
    "Return a type or a default as it is written in code, without modules"
    has_name = hasattr(o, '__name__') and not getattr(o, '__args__', None)   # `list[int]` has both attributes
    text = o if isinstance(o, str) else o.__name__ if has_name else repr(o)
    text = re.sub(r'<function (\w+) at \w+>', r'\1', text)
    return re.sub(r'\b[a-z_]\w*\.', '', text).replace(' | ', '|').replace('NoneType', 'None')

class Default:
    "A default whose `repr`, which signatures show, is its code"
    def __init__(self, o): self.o = o
    def __repr__(self): return repr(self.o) if isinstance(self.o, str) else written(self.o)

def signature(o):
    """Return the parameters of `o` with their defaults, in parentheses, and the type of the result

    Of an exception, return an empty text.
    """
    if inspect.isclass(o) and issubclass(o, BaseException): return ''
    params,result = [],inspect.signature(o).return_annotation
    for p in inspect.signature(o).parameters.values():
        default = p.empty if p.default is p.empty else Default(p.default)
        if p.name!='self': params.append(p.replace(annotation=p.empty, default=default))
    returns = '' if result in (inspect.Signature.empty,None) or inspect.isclass(o) else f' -> {written(result)}'
    return str(inspect.Signature(params))+returns

def code(text): return f'`{text}`' if text else ''

def table(head, rows):
    "Return a Markdown table, or an empty text if there are no rows"
    def row(cells): return '| ' + ' | '.join(o.replace('|', r'\|').replace('\n', ' ') for o in cells) + ' |'
    return '\n'.join(map(row, [head, ['---']*len(head), *rows])) if rows else ''

def parameter_table(o):
    "Return a table of the parameters and the result of `o`, if its code has comments on them"
    comments = docments(o, args_kwargs=True) | inherited_details.get(o.__name__, {})
    if not any(comments.values()): return ''
    def types(annotation):
        if annotation is inspect.Parameter.empty: return ''
        # the annotation of `micro_batch_size` cannot name these classes, whose modules import its module
        text = written(annotation).replace('|object', '|AutoSize|TokenBudget')
        return code(text) if '[' in text else ' | '.join(map(code, text.split('|')))
    sig = inspect.signature(o)
    rows = []
    for nm,p in sig.parameters.items():
        default = '' if p.default is p.empty else code(repr(Default(p.default)))
        if nm!='self': rows.append((code(nm), types(p.annotation), default, comments.get(nm) or ''))
    if comments.get('return'): rows.append(('*returns*', types(sig.return_annotation), '', comments['return']))
    return table(('Name','Type','Default','Details'), rows)

raised = r'[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning)'
re_errors = re.compile(fr'^({raised}): +(.+(?:\n(?!{raised}: ).+)*)', re.M)

def split_errors(doc):
    "Return a docstring without its errors, such as `TypeError: it is no number`, and a list of pairs (error, when)"
    text,*more = re.split(r'\n\s*\n', doc)
    others = [o for o in more if not re_errors.match(o)]
    found = [match for o in more if o not in others for match in re_errors.findall(o)]
    return '\n\n'.join([text, *others]),[[nm, ' '.join(when.split())] for nm,when in found]

def entry(mod, nm, again=False):
    "Return the entry of `nm`: signature, docstring, parameters, errors. With `again`, links lead to another entry"
    o = resolve(mod, nm)
    owner,_,attribute = nm.rpartition('.')
    is_property = owner and isinstance(inspect.getattr_static(getattr(mod, owner), attribute), property)
    kind,sig,params = 'data','',''
    text,errors = '',[]
    if inspect.isclass(o) or inspect.isfunction(o):
        kind = 'property' if is_property else 'method' if owner else 'class' if inspect.isclass(o) else 'function'
        text,errors = split_errors(inspect.getdoc(o) if o.__doc__ else '')
        if '__init__' in vars(o): errors += split_errors(inspect.getdoc(o.__init__) or '')[1]
        if not is_property: sig,params = signature(o),parameter_table(o)
    anchor = f'<a id="{nm.lower()}"></a>'   # the anchor to which nbdev links from other projects
    options = f':module: {mod.__name__}' + ('\n:no-index:' if again else '')
    title = 'Errors and warnings' if any(error.endswith('Warning') for error,_ in errors) else 'Errors'
    parts = [text, params, table((title,'When'), [(code(error), when) for error,when in errors])]
    return '\n\n'.join([anchor, f'::::{{py:{kind}}} {nm}{sig}\n{options}', *filter(None, parts), '::::'])

# The notebooks

def markdown(text): return mk_cell(text, 'markdown')

def page(path):
    "Return the name of the page of a notebook; `path` is relative to `nbs`: `step/03_mean.ipynb` is `step/mean`"
    *folders,nm = Path(path).with_suffix('').as_posix().lower().split('/')
    return '/'.join([*folders, re.sub(r'^[0-9]+[a-z0-9]*_', '', nm)])

re_option = re.compile(r'^#\| *([\w-]+):? *(.*)\n?', re.M)
class Page:
    "A notebook, from which one or two pages of the site are written"
    def __init__(self, path):
        self.path = path
        self.name = page(path.relative_to(root/'nbs'))
        self.folder = self.name.rpartition('/')[0]
        title,*self.cells = read_nb(path).cells
        lines = title.source.splitlines()
        settings = dict(o[2:].split(': ', 1) for o in lines if o.startswith('- '))
        self.title = lines[0].lstrip('# ')
        self.lede = ' '.join(o[2:] for o in lines if o.startswith('> '))
        # from keywords to the anchor of the section that answers, or ''
        self.keywords = dict(re.findall(r'([^,#\s][^,#]*)#?([^,]*)', settings.get('keywords', '')))
        self.extra_names = settings.get('api', '').split()   # names that users meet without importing them
        self.inner_methods = settings.get('inner', '').split()   # public methods that are not for users
        section = ''
        for c in self.cells:
            c.options = {}
            if c.cell_type=='code': self.prepare(c)
            else:
                c.source = self.linked(c.source)
                head = re.match('## (.+)', c.source)
                if head: section = head[1].strip()
            c.section = section
        exports = [c.options['default_exp'] for c in self.cells if 'default_exp' in c.options]
        self.mod = import_module(f'fastaccum.{exports[0]}') if exports else None
        # whether users import something from this module: if so, the page with all cells is a separate page
        self.is_api = self.mod and not self.folder and any(c.section in ('Examples','Caveats') for c in self.cells)
        self.whole = f'modules/{self.name}' if self.is_api else self.name

    def prepare(self, c):
        "Note the options of a code cell, and tell myst-nb how to show it"
        c.options = dict(re_option.findall(c.source))
        c.source = re_option.sub('', c.source).strip('\n')
        kinds = {kind for o in c.outputs for kind in o.get('data', {})}
        draws = 'text/markdown' in kinds or 'image/png' in kinds and c.source.count('\n')>3
        fold = 'export' in c.options or c.options.get('code-fold', str(draws).lower())=='true'
        tag = 'remove-input' if c.options.get('echo')=='false' else 'hide-input' if fold else ''
        about = {}
        if fold and not c.outputs: about['code_prompt_show'] = 'Show the code that is used below'
        if 'image/png' in kinds:
            alt = c.options.get('fig-alt', '').strip('"')
            if not alt: sys.exit(f'{self.path}: the picture of cell {c.id} needs a text: #| fig-alt: "..."')
            about['image'] = dict(alt=alt, classes='photo' if 'photo' in c.options else 'plot')
        c.metadata = dict(tags=[tag], mystnb=about)
        for o in c.outputs:
            if 'text' in o: o['text'] = readme.shown(''.join(o['text']))
            if max(map(len, o.get('text', '').splitlines()), default=0)>200: o['name'] = 'stderr'   # prose wraps
            data = o.get('data', {})
            if 'text/markdown' in data: data['text/markdown'] = self.linked(''.join(data['text/markdown']))

    def linked(self, text):
        "Replace the links to notebooks in a text by links to pages"
        def link(m):
            notebook = (self.path.parent/f'{m[1]}.ipynb').resolve()
            return f'](/{page(notebook.relative_to(root/"nbs"))}.ipynb'
        return re.sub(r'\]\((?!\w+:)([^)#\s]+)\.ipynb', link, text)

    def public(self):
        "Return the public names of the module in order"
        return [nm for c in self.cells if self.mod and 'export' in c.options for nm in defined(c.source)]

    def functions(self):
        "Return the public names of the module without methods"
        return [nm for nm in self.public() if '.' not in nm]

    def described(self):
        "Return the names with an entry on the page for users"
        if not self.is_api: return [] if self.mod else self.extra_names
        known = {*fastaccum.__all__, 'Learner', *self.extra_names}
        def is_for_users(nm):
            top,_,method = nm.partition('.')
            return {nm, top}&known and method not in self.inner_methods and not method.startswith(('before_','after_'))
        return list(filter(is_for_users, self.public()))

    def typed_names(self):
        "Return the names of `described` without methods, except for methods of the Learner"
        names = [nm.replace('Learner.', 'learn.') for nm in self.described()]
        return [nm for nm in names if '.' not in nm or nm.startswith('learn.')]

    def title_names(self):
        "Return the names that the page is about: those that users type, without the classes of results"
        names = self.typed_names()
        return [nm for nm in names if nm not in self.extra_names] or names

    def imports(self, with_example=False):
        "Return the import of the page's names; `with_example` adds the example of the first text, if there is one"
        first = next((c.source for c in self.cells if c.cell_type=='markdown'), '')
        example = re.search(r'^```python\n(.*?)^```', first, re.M|re.S)
        if example and re.search('^(?:import|from) ', example[1], re.M): return example[0] if with_example else ''
        names = self.functions() or self.extra_names
        top = [nm for nm in names if nm in fastaccum.__all__]
        lines = f'from {"fastaccum" if top else self.mod.__name__} import {", ".join(top or names)}\n' if names else ''
        if with_example and example: lines += example[1]
        return f'```python\n{lines}```' if lines else ''

    def api_cells(self):
        "Yield the cells of the page for users of a module"
        yield markdown(self.imports(with_example=True))
        for nm in self.described(): yield markdown(entry(self.mod, nm))
        yield from self.shown([c for c in self.cells if c.section in user_sections])
        link = f"[module's page](/{self.whole}.ipynb)"
        yield markdown(f'How it is built, with all examples: the {link}, for contributors.')

    def shown(self, cells):
        "Yield the cells without plumbing and with folded imports, and an entry above the code of each public name"
        described = {*self.described(), *fastaccum.__all__}   # links lead to their entries on another page
        waiting = [] if self.mod else [*self.extra_names]   # their entries follow the text that names them first
        folded = []   # imports, and code before the first entry, for one folded cell
        begun = not self.mod
        for c in cells:
            if c.cell_type!='code':
                yield c
                for nm in [nm for nm in waiting if f'`{nm}`' in c.source]:
                    waiting.remove(nm)
                    yield markdown(entry(import_module(getattr(fastaccum, nm).__module__), nm))
                continue
            if hides(c.options, c.source): continue
            names = defined(c.source) if 'export' in c.options else []
            begun = begun or bool(names)
            is_plumbing = 'export' in c.options and not begun
            if is_plumbing or {'hide','export'}&c.options.keys() and only_imports(c.source):
                folded.append(re_nbdev.sub('', c.source).strip('\n'))
                continue
            for nm in names: yield markdown(entry(self.mod, nm, again=nm in described))
            if folded:
                source = '\n'.join(folded)
                label = 'Show the imports' if only_imports(source) else 'Show code'
                yield mk_cell(source, metadata=dict(tags=['hide-input'], mystnb=dict(code_prompt_show=label)))
                folded = []
            if c.source or c.outputs: yield c

    def answers(self):
        "Return pairs of a title or keyword of the page and the anchor of the section that answers it, or ''"
        keywords = {self.title: '', **self.keywords}
        if self.name=='reference/messages':
            text = '\n'.join(c.source for c in self.cells)
            keywords |= {key.replace('-', ' ').capitalize(): key for key in messages.anchors(text)}
        if self.name=='reference/faq':   # its questions
            heads = [m[1] for c in self.cells for m in re.finditer('^### (.+)', c.source, re.M)]
            heads = [o.replace('`', '').rstrip('?') for o in heads]
            keywords |= {o: re.sub('[ _]', '-', re.sub(r'[^\w -]', '', o.lower())) for o in heads}
        return [*keywords.items()]

    def headings(self):
        "Return a dict from the anchors that are not made from a heading to the heading above them"
        return messages.anchors('\n'.join(c.source for c in self.cells if c.cell_type=='markdown'))

# The site

def toctree(pages, caption=''):
    "Return a table of contents of Sphinx with an entry for each page"
    items = [f'{short_titles[o]} </{o}>' if o in short_titles else f'/{o}' for o in pages]
    options = [':hidden:', ':titlesonly:', *([f':caption: {caption}'] if caption else [])]
    return '\n'.join(['```{toctree}', *options, '', *items, '```'])

def contents(pages, names_of, address):
    "Return a cell that lists the pages, with the names of `names_of(page)` and the line below the title"
    items = []
    for p in pages:
        names = names_of(p)
        to = f'](/{address(p)}.ipynb)'
        if p.is_api and address(p)!=p.whole or names==[p.title]:   # names, each a link to their page
            items.append(f'{" ".join(f"[{code(nm)}{to}" for nm in names)}\n: {p.lede}\n')
        else:
            entry = [f'[{p.title}{to}\n: {p.lede}\n']
            if names: entry.append(f'  {" ".join(map(code, names))}\n')
            items.append('\n'.join(entry))
    return markdown('\n'.join(items))

def write_page(src, name, title, lede, cells, keywords=(), inner=False):
    "Write a page for Sphinx; an `inner` page is not in the search"
    about = re.sub(r'\[([^]]*)\]\([^)]*\)|`', r'\1', lede) or f'{title}: fastaccum, gradient accumulation for fastai'
    if name.startswith('modules/'): about = f'The module {name[8:]}, for contributors: {about}'
    meta = dict(language_info=dict(name='python', pygments_lexer='ipython3'), description=about)
    if keywords: meta['myst'] = dict(html_meta=dict(keywords=', '.join(keywords)))
    if inner: meta |= dict(nosearch=True, orphan=True)
    head = [f'# {title}', f'{{.lede}}\n{lede}' if lede else '']
    if name.startswith(('guides/','get_started')):
        head.append(f'{{.no-search}}\n[Open in Colab]({readme.colab_url(f"nbs/{name}.ipynb")})')
    file = src/f'{name}.ipynb'
    file.parent.mkdir(parents=True, exist_ok=True)
    write_nb(new_nb([markdown('\n\n'.join(head)), *cells], meta=meta), file)

def write_pages(src, pages):
    "Write all pages for Sphinx to the folder `src`, and return the pages of the contributors' menu"
    users = [p for p in pages if p.is_api or not p.mod and p.extra_names]
    mods = sorted((p for p in pages if p.mod), key=lambda p: ['',*rooms].index(p.folder))
    contributing = sorted((p for p in pages if p.folder=='contribute'), key=lambda p: [*order, p.name].index(p.name))
    for file,name in ('CHANGELOG','changelog'), ('CONTRIBUTING','contribute/index'):
        title,_,text = (root/f'{file}.md').read_text(encoding='utf-8').partition('\n')
        text = re.sub(re.escape(readme.docs_url())+r'/([\w/]+)\.html', r'/\1.ipynb', text)
        write_page(src, name, title[2:], '', [markdown(text)], inner=name!='changelog')
    lede = 'What you call, and what you get back. Each page has the parameters, errors, examples and caveats.'
    by_name = {p.name:p for p in users}
    groups = {title: [by_name.pop(name) for name in names.split()] for title,names in api_groups.items()}
    if by_name: raise ValueError(f'pages that are in no group of the API: {", ".join(by_name)}')
    cells = []
    for title,grouped in groups.items():
        cells += [markdown(f'## {title}'), contents(grouped, Page.title_names, lambda p: p.name)]
    # a page stands once in the menu
    cells.append(markdown(toctree(p.name for grouped in groups.values() for p in grouped if p.name not in order)))
    write_page(src, 'reference/api', 'API', lede, cells)
    lede = ('The source code, one page per module, in reading order. '
        'Each page mixes prose, code, and examples that double as tests.')
    cells = [contents([p for p in mods if not p.folder], Page.functions, lambda p: p.whole)]
    for room,title in rooms.items():
        inside = [p for p in mods if p.folder==room]
        cells += [markdown(f'## {title}'), contents(inside, Page.functions, lambda p: p.whole)]
    write_page(src, 'modules/index', 'Modules', lede, cells, inner=True)
    for p in pages:
        cells = [markdown(p.imports() if p.mod else ''), *p.shown(p.cells)]
        if p.name=='index': cells += [markdown(toctree(names.split(), caption)) for caption,names in menu.items()]
        words = dict.fromkeys(o for word in p.keywords for o in word.lower().split())
        if p.name=='reference/messages':   # so that the search finds all words of messages
            words |= dict.fromkeys(re.findall(r'\w+', ' '.join(o.text for o in messages.messages() if o.key).lower()))
        write_page(src, p.whole, p.title, p.lede, cells, words, inner=bool(p.mod or p in contributing))
        if p.is_api:
            write_page(src, p.name, ', '.join(p.title_names()), p.lede, p.api_cells(), words)
    about = [('Contribute','contribute/index'), *((p.title, p.name) for p in contributing)]
    def listed(folder): return [(p.title, p.whole) for p in mods if p.folder==folder]
    source = [('Source', [('Modules','modules/index'), *listed('')])]
    source += [(title, listed(room)) for room,title in rooms.items()]
    return [('', [('For users','index')]), ('', about), *source]

# For tools that read documentation

def written_pages(src):
    "The pages that were written to `src` for Sphinx: of each, its name, title, description, and whether it is inner"
    for file in sorted(src.rglob('*.ipynb')):
        nb = read_nb(file)
        title = nb.cells[0].source.partition('\n')[0].removeprefix('# ')
        name = file.relative_to(src).with_suffix('').as_posix()
        yield name,title,nb.metadata['description'],'nosearch' in nb.metadata

# a reference entry as `entry` writes it: anchor, signature, options of Sphinx, text
re_entry = re.compile(r'<a id="[^"]*"></a>\n\n::::\{py:\w+\} (.+)\n(?::.+\n)*((?:.*\n)*?)::::$', re.M)

def without_directives(text):
    "Return a text for Sphinx as Markdown, with links to the site and without what only Sphinx reads"
    text = re_entry.sub(r'### `\1`\n\2', text)   # reference entries
    text = re.sub(r'^\{\.lede\}\n', '> ', text, flags=re.M)
    text = re.sub(r'^```\{toctree\}\n.*?^```\n?|^\{\.[\w-]+\}\n', '', text, flags=re.M|re.S)
    text = re.sub(r'\n{3,}', '\n\n', text).strip()
    return re.sub(r'\]\(/([\w/]+)\.ipynb', rf']({readme.docs_url()}/\1.html', text)

def code_as_markdown(cell):
    "Return a code cell and its outputs as a list of texts; folded code is shown, unless it makes a table"
    about = cell['metadata'].get('mystnb', {})
    def image(data):   # myst-nb names pictures after their content
        return f'{readme.docs_url()}/_images/{sha256(data).hexdigest()}.png'
    alt = about.get('image', {}).get('alt', '')
    outputs = [readme.output(o, alt, image, without_directives) for o in cell['outputs']]
    tags = cell['metadata'].get('tags', [])
    makes_table = any('text/markdown' in o.get('data', {}) for o in cell['outputs'])
    makes_folded_table = 'hide-input' in tags and makes_table
    if not cell['source'] or 'remove-input' in tags or makes_folded_table: return outputs
    return [readme.fence(''.join(cell['source']), 'python'), *outputs]

def as_markdown(file):
    "Return a page that was written for Sphinx as Markdown"
    parts = []
    for c in json.loads(file.read_text(encoding='utf-8'))['cells']:
        if c['cell_type']=='markdown': parts.append(without_directives(''.join(c['source'])))
        else: parts += code_as_markdown(c)
    return '\n\n'.join(filter(None, parts))+'\n'

def write_markdown(src):
    "Write each page as Markdown beside it"
    for name,*_ in written_pages(src):
        (site/f'{name}.html.md').write_text(as_markdown(src/f'{name}.ipynb'), encoding='utf-8')

def llms_txt(src):
    "The list of all pages, in the form that llmstxt.org describes; a tool may leave out the last section"
    url = readme.docs_url()
    about = {name: (title,description) for name,title,description,_ in written_pages(src)}
    inner = [name for name,*_,is_inner in written_pages(src) if is_inner]
    sections = {caption or 'Start': names.split() for caption,names in menu.items()}
    sections['Start'].insert(0, 'index')
    listed = {*inner, *(name for names in sections.values() for name in names)}
    sections['API'] = [name for name in about if name not in listed]
    sections['Optional'] = inner   # for contributors
    def item(name):
        title,description = about[name]
        return f'- [{title}]({url}/{name}.html.md): {description}'
    first,summary = fastaccum.__doc__.split('\n\n')[:2]
    head = [f'# {fastaccum.__name__}', f'> {first} {" ".join(summary.split())}',
        'The links lead to the pages as Markdown. An address without the `.md` at its end is that of the HTML page.',
        f'Before you write code, read [SKILL.md]({url}/SKILL.md): the rules, and the remedy for each warning.']
    parts = [f'## {caption}\n\n' + '\n'.join(map(item, names)) for caption,names in sections.items()]
    return '\n\n'.join([*head, *parts])+'\n'

def write_for_tools(src):
    "Write what tools read: `llms.txt`, the pages as Markdown, and `SKILL.md`"
    write_markdown(src)
    (site/'llms.txt').write_text(llms_txt(src), encoding='utf-8')
    shutil.copy(root/'skills/fastaccum/SKILL.md', site)

def mark_beginnings(script):
    "Change the script of Sphinx that marks the words of a search: mark beginnings of words only"
    old = 'val.toLowerCase().indexOf(text)'
    new = r'val.toLowerCase().search("(?<!\\w)" + text.replace(/[^\w ]/g, "\\$&"))'
    text = script.read_text(encoding='utf-8')
    if text.count(old)!=1: sys.exit(f'{script.name} of this version of Sphinx does not contain {old}')
    script.write_text(text.replace(old, new), encoding='utf-8')

def write_redirects():
    "Write a page for each old address, which leads to the new one"
    for name,target in moved.items():
        url = '../'*name.count('/')+target
        text = (f'<!doctype html><title>Moved</title><meta http-equiv="refresh" content="0; url={url}">'
            f'<a href="{url}">This page has moved.</a>')
        (site/f'{name}.html').write_text(text, encoding='utf-8')

def write_not_found():
    "Write the page that GitHub Pages shows for an unknown address, which may be in any folder"
    home = get_config(root).doc_url.rstrip('/')
    links = {'':'Home', 'get_started.html':'Get started', 'search.html':'Search',
        'reference/messages.html':'Errors and warnings'}
    items = ''.join(f'<li><a href="{home}/{o}">{text}</a></li>' for o,text in links.items())
    text = (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Page not found</title>'
        f'<meta name="viewport" content="width=device-width"><h1>There is no page at this address</h1><ul>{items}</ul>')
    (site/'404.html').write_text(text, encoding='utf-8')

def main():
    from sphinx.application import Sphinx
    pages = [*map(Page, sorted(nbglob(root/'nbs', as_path=True)))]
    names = {nm: f'{p.mod.__name__}.{nm}' for p in pages if p.mod for nm in p.public()}
    with TemporaryDirectory() as tmp:
        src,out = Path(tmp)/'pages',Path(tmp)/'site'
        contributor_menu = write_pages(src, pages)
        answers = json.dumps({p.name: p.answers() for p in pages if p.keywords})
        headings = json.dumps({p.name: p.headings() for p in pages if p.name=='reference/messages'})
        said = json.dumps([(o.text, o.key) for o in messages.messages() if o.key])
        script = (here/'search.js').read_text(encoding='utf-8')
        script = f'const keywords = {answers};\nconst headings = {headings};\nconst said = {said};\n{script}'
        (src/'search.js').write_text(script, encoding='utf-8')
        settings = {'names':names, 'html_context.contributor_menu':contributor_menu,
            'html_search_scorer':str(src/'search.js')}
        app = Sphinx(src, here, out, Path(tmp)/'doctrees', 'html', settings, status=None, warningiserror=True)
        app.build()
        if app.statuscode: return app.statuscode
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(out, site)
        write_for_tools(src)
    mark_beginnings(site/'_static/sphinx_highlight.js')
    write_redirects()
    write_not_found()
    print(f'{len(list(site.rglob("*.html")))} pages in {site.name}')

if __name__=='__main__': sys.exit(main())
