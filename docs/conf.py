"Settings of Sphinx, and changes that it makes to the pages written by build.py."
import inspect, re, subprocess, sys
from importlib import import_module
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parent))
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from sphinx.addnodes import desc, pending_xref
from build import resolve, root

cfg = get_config(root)
project = cfg.title
author = copyright = cfg.author
release = cfg.version
repository = cfg.git_url
html_baseurl = cfg.doc_url
html_title = f'{project} {release}'

extensions = ['myst_nb', 'sphinx_copybutton', 'sphinx.ext.githubpages', 'sphinx.ext.linkcode']
nb_execution_mode = 'off'
nb_render_markdown_format = 'myst'   # for tables in outputs of cells
nb_code_prompt_show = 'Show code'
nb_code_prompt_hide = 'Hide code'
myst_enable_extensions = ['attrs_block', 'colon_fence', 'deflist', 'dollarmath']
myst_dmath_allow_digits = False   # so that `$5 and $6` is no formula
myst_heading_anchors = 4
smartquotes_action = 'De'   # dashes and ellipses, no quotes: 'auto' in an entry has to be valid Python
# the changelog skips a level of headings, and some defaults in signatures are not valid Python
suppress_warnings = ['myst.header', 'misc.highlighting_failure']
add_module_names = False
toc_object_entries_show_parents = 'hide'

def colors(brand, yes, no):
    "Return CSS variables: the colour of links, and those of the marks ✓ and ✗ in tables"
    return {'color-brand-primary':brand, 'color-brand-content':brand, 'color-brand-visited':brand,
        'color-yes':yes, 'color-no':no}

html_theme = 'furo'
pygments_style = 'default'
pygments_dark_style = 'github-dark'
html_static_path = ['style.css', 'tables.js', '../images/same-run.png']
html_css_files = ['style.css']
html_js_files = ['tables.js']
html_favicon = html_logo = 'icon.svg'
html_math_renderer = 'mathml'
html_copy_source = html_show_sphinx = html_use_index = html_domain_indices = False
templates_path = ['templates']
html_context = dict(repository=repository, base_url=html_baseurl)
html_theme_options = dict(top_of_page_buttons=['view'], footer_icons=[],
    light_css_variables=colors('#1d5fa8', '#1a7431', '#b42333'),
    dark_css_variables=colors('#7fb8f5', '#5fcf80', '#ff8b94'))
copybutton_selector = '.cell_input div.highlight pre, div[class^="highlight-"]:not(.output) > div.highlight > pre'

def git(*args):
    "Return what git prints, also in a checkout that belongs to another user; an empty text if it fails"
    cmd = ['git', '-c', 'safe.directory=*', *args]
    return subprocess.run(cmd, cwd=root, capture_output=True, text=True).stdout.strip()
# links to source code use the tag of this version or the commit, because line numbers change on a branch
pinned = git('describe', '--tags', '--exact-match') or git('rev-parse', 'HEAD') or 'main'

def linkcode_resolve(domain, info):
    "Return the address of the lines that define a public name"
    mod = import_module(info['module'])
    url = f'{repository}/blob/{pinned}/{info["module"].replace(".", "/")}.py'
    o = resolve(mod, info['fullname'])
    if not (inspect.isclass(o) or inspect.isfunction(o)): return url
    lines,start = inspect.getsourcelines(o)
    return f'{url}#L{start}-L{start+len(lines)-1}'

fastai = NbdevLookup(strip_libs=('fastai',))

def link_names(app, doctree):
    "Link names in the text to their entries or to fastai's documentation, once in each section"
    linked = set()
    for code in [*doctree.findall(nodes.literal)]:
        name = code.astext()
        section,parents = code.parent,[]
        while not isinstance(section, (nodes.section, nodes.document, desc)):
            parents.append(section)
            section = section.parent
        is_name = re.fullmatch(r'[A-Za-z_][\w.]*', name) and re.search('[A-Z_.]', name)
        has_link = any(isinstance(o, (nodes.title, nodes.reference, pending_xref)) for o in parents)
        if not is_name or has_link or (section,name) in linked: continue
        linked.add((section,name))
        target = app.config.names.get(name)
        url = fastai.doc(name) if name[0].isupper() else None
        if target: link = pending_xref(refdomain='py', reftype='obj', reftarget=target, refdoc=app.env.docname)
        elif url and 'docs.fast.ai' in url: link = nodes.reference(refuri=url)
        else: continue
        code.replace_self(link)
        link += code

def leave_out_names(app, env):
    "Remove names with entries on pages for contributors from the search, by marking them as aliases"
    objects = env.domaindata['py']['objects']
    for name,o in objects.items():
        if 'nosearch' in env.metadata[o.docname]: objects[name] = o._replace(aliased=True)

def leave_out_of_search(app, doctree, name):
    """Remove printed text, folded code and formulas from the search

    Do not wrap lines of printed tables on narrow screens.
    """
    for o in doctree.findall(nodes.literal_block):
        if 'output' not in o['classes']: continue
        o['classes'].append('no-search')
        if '   ' in o.astext(): o['classes'].append('columns')
    for o in doctree.findall(lambda o: 'tag_hide-input' in getattr(o, 'attributes', {}).get('classes', ())):
        for code in o.findall(nodes.literal_block): code['classes'].append('no-search')
    for o in doctree.findall(lambda o: isinstance(o, (nodes.math, nodes.math_block))): o['classes'].append('no-search')

def mathml(as_block):
    "Return a function that writes a formula as MathML, which browsers render without a script"
    def visit(self, node):
        self.body.append(tex2mathml(node.astext(), as_block))
        raise nodes.SkipNode
    return visit

def setup(app):
    app.add_config_value('names', {}, 'env')   # from short to full public names
    app.add_html_math_renderer('mathml', (mathml(False), None), (mathml(True), None))
    app.connect('doctree-read', link_names)
    app.connect('env-updated', leave_out_names)
    app.connect('doctree-resolved', leave_out_of_search)
