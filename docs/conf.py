"Settings of Sphinx; build.py prepares the pages."
import html, inspect, json, re, subprocess, sys
from importlib import import_module
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parent))
from docutils import nodes
from build import resolve, root

ini,toml = ((root/o).read_text(encoding='utf-8') for o in ('settings.ini','pyproject.toml'))
def fact(pattern, text): return re.search(pattern, text, re.M)[1]

project = fact(r'^name *= *"(.+)"', toml)
author = copyright = fact(r'^author *= *(.+)', ini)
release = fact(r'^__version__ *= *"(.+)"', (root/project/'__init__.py').read_text(encoding='utf-8'))
html_title = f'{project} {release}'
html_baseurl,repository = fact(r'^Documentation *= *"(.+)"', toml),fact(r'^Repository *= *"(.+)"', toml)

extensions = ['myst_nb', 'sphinx_copybutton', 'sphinx.ext.githubpages', 'sphinx.ext.linkcode']
nb_execution_mode = 'off'
nb_render_markdown_format = 'myst'   # tables that a cell made
nb_code_prompt_show,nb_code_prompt_hide = 'Show code','Hide code'
myst_enable_extensions = ['attrs_block', 'colon_fence', 'deflist']
myst_heading_anchors = 4
# a changelog skips a level; a shown default may be no Python
suppress_warnings = ['myst.header', 'misc.highlighting_failure']
add_module_names = False
toc_object_entries_show_parents = 'hide'
nitpicky = False

def colors(brand, yes, no):
    "Of one theme: links and what else has the project's colour, and the marks ✓ and ✗ in tables"
    return {f'color-brand-{o}':brand for o in ('primary','content','visited')}|{'color-yes':yes, 'color-no':no}

html_theme = 'furo'
pygments_style,pygments_dark_style = 'default','github-dark'
html_static_path,html_css_files,html_favicon = ['style.css','preview.png'],['style.css'],'icon.svg'
html_copy_source = html_show_sphinx = html_use_index = html_domain_indices = False
templates_path = ['templates']
html_context = dict(repository=repository)
html_theme_options = dict(top_of_page_buttons=['view'], footer_icons=[],
    light_css_variables=colors('#1d5fa8', '#1a7431', '#b42333'),
    dark_css_variables=colors('#7fb8f5', '#5fcf80', '#ff8b94'))
copybutton_selector = '.cell_input div.highlight pre, div[class^="highlight-"]:not(.output) > div.highlight > pre'

def pin():
    "What the links to source are pinned to: the tag of this version, or the commit"
    def git(*args): return subprocess.run(['git', *args], cwd=root, capture_output=True, text=True).stdout.strip()
    return git('describe', '--tags', '--exact-match') or git('rev-parse', 'HEAD') or 'main'
pinned = pin()

def describe(app, name, template, context, doctree):
    "What a page is about, and a picture, for those who share its address"
    if not doctree: return
    ledes = [o for o in doctree.findall() if 'lede' in getattr(o, 'attributes', {}).get('classes', ())]
    lede = ledes[0].astext() if ledes else ''
    if name.startswith('modules/'): lede = f'The module {name[8:]}, for contributors: {lede}'
    text = html.escape(lede or f'{context["title"]}: {project}, gradient accumulation for fastai', quote=True)
    tags = dict(title=html.escape(context['title']), description=text, type='website',
        image=f'{html_baseurl}_static/preview.png', url=f'{html_baseurl}{name}.html')
    context['metatags'] += f'<meta name="description" content="{text}">\n' + ''.join(
        f'<meta property="og:{k}" content="{v}">\n' for k,v in tags.items()
        ) + '<meta name="twitter:card" content="summary_large_image">\n'

def inner(app): return json.loads((Path(app.srcdir)/'inner.json').read_text(encoding='utf-8'))

def leave_out(app, env):
    "What is for contributors is not in the search"
    docs = {name for _,name in inner(app)}
    for o in docs: env.metadata[o]['nosearch'] = True
    objects = env.domaindata['py']['objects']
    for k,o in objects.items():
        if o.docname in docs: objects[k] = o._replace(aliased=True)   # Sphinx does not search for these
    return []

def leave_out_outputs(app, doctree, name):
    "Nor is what cells print, where a page is about something else; if it has columns, its lines are not wrapped"
    for o in doctree.findall(nodes.literal_block):
        if 'output' in o['classes']: o['classes'] += ['no-search','columns'] if '   ' in o.astext() else ['no-search']

def own_menu(app, name, template, context, doctree):
    "The pages for contributors have a menu of their own"
    pages = inner(app)
    if name not in {o for _,o in pages}: return
    def item(title, o):
        current = ' current current-page' * (o==name)
        url = '#' if current else context['pathto'](o)
        link = f'<a class="reference internal" href="{url}">{html.escape(title)}</a>'
        return f'<li class="toctree-l1{current}">{link}</li>'
    at = [o for _,o in pages].index('modules/index')
    lists = ['<ul>'+''.join(item(*o) for o in part)+'</ul>' for part in (pages[:at], pages[at:])]
    source = '<p class="caption"><span class="caption-text">Source</span></p>'
    context['furo_navigation_tree'] = f'<ul>{item("For users", "index")}</ul>{lists[0]}{source}{lists[1]}'

def setup(app):
    app.connect('env-updated', leave_out)
    app.connect('doctree-resolved', leave_out_outputs)
    app.connect('html-page-context', describe)
    app.connect('html-page-context', own_menu, priority=900)   # after the theme's

def linkcode_resolve(domain, info):
    "The lines of a public name on GitHub"
    mod = import_module(info['module'])
    url,o = f'{repository}/blob/{pinned}/{info["module"].replace(".", "/")}.py',resolve(mod, info['fullname'])
    if not (inspect.isclass(o) or inspect.isfunction(o)): return url
    lines,start = inspect.getsourcelines(o)
    return f'{url}#L{start}-L{start+len(lines)-1}'
