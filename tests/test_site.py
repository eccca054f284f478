"""The documentation site works, in most tests in a browser. `make docs-test` builds and tests it.

All tests are skipped if the site has not been built, and the tests in a browser are skipped without
Chromium. With `SITE=built`, a missing site is a failure. `SHOTS=folder` saves four screenshots of each
page: on a wide and a narrow screen, with light and dark colours.
"""
import functools, inspect, json, os, re, shutil, sys
from html import unescape
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
import pytest

root = Path(__file__).resolve().parent.parent
site = root/'_docs'
chromium = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')

def skip(why):
    "Skip this whole file, or fail if the site should have been built"
    if os.environ.get('SITE')=='built': pytest.fail(f'the site should have been built, but {why}')
    pytest.skip(f'THE SITE IS NOT TESTED: {why}', allow_module_level=True)
if not (site/'objects.inv').exists(): skip('it has not been built: make docs')
try: from playwright.sync_api import sync_playwright
except ImportError: skip('playwright is not installed: make docs')
sys.path.insert(0, str(root/'docs'))
from fastcore.nbio import read_nb
from nbdev.doclinks import nbglob
from sphinx.util.inventory import InventoryFile
from build import hides, moved, order, rooms, page as page_of, resolve, split_errors
from readme import docs_url
sources = [fn for folder in ('docs','fastaccum','nbs','skills') for fn in (root/folder).rglob('*.*')]
built = (site/'searchindex.js').stat().st_mtime
if any(fn.stat().st_mtime>built for fn in sources if '__pycache__' not in fn.parts):
    skip('it is older than what it is made of: make docs')

# pages that Sphinx has not made
others = {f'{o}.html' for o in moved} | {'404.html'}
pages = sorted({o.relative_to(site).as_posix() for o in site.rglob('*.html') if '_static' not in o.parts}-others)
# `entries` has the names in Sphinx's inventory: {short name: (full name, page with the entry of this
# name)}
inventory = InventoryFile.loads((site/'objects.inv').read_bytes(), uri='')
folders = '|'.join(rooms)
entries = {re.sub(rf'^fastaccum\.(({folders})\.)?\w+\.', '', full): (full, item.uri.partition('.html')[0])
    for kind,items in inventory.data.items() if kind.startswith('py:') for full,item in items.items()}
names = {nm:full for nm,(full,_) in entries.items()}
# modules that users import: each has a page for users, and another page with the whole module
public_modules = sorted(o.stem for o in (site/'modules').glob('*.html') if o.stem!='index')
user_pages = [f'{o}.html' for o in ('index',*order,*public_modules) if not o.startswith('contribute/')]

# Tests that need no browser

@functools.cache
def read(page): return (site/page).read_text(encoding='utf-8')
@functools.cache
def ids(page): return set(re.findall(r'\sid="([^"]+)"', read(page)))
def link_targets(page): return {unescape(o) for o in re.findall(r'\s(?:href|src)="([^"]+)"', read(page))}

@pytest.mark.parametrize('page', pages)
def test_the_links_of_a_page_lead_to_files_and_anchors_that_exist(page):
    bad = []
    for href in link_targets(page):
        url,anchor = urldefrag(urljoin(f'http://site/{page}', href))
        if not url.startswith('http://site/'): continue
        path = unquote(url.removeprefix('http://site/').partition('?')[0]) or 'index.html'
        if not (site/path).is_file(): bad.append(href)
        elif anchor and path.endswith('.html') and unquote(anchor) not in ids(path): bad.append(href)
    assert not bad

@pytest.mark.parametrize('page', pages)
def test_no_link_stands_within_another_link(page):
    assert not re.search(r'<a [^>]*>(?:(?!</a>).)*?<a ', read(page), re.S)

def test_the_old_addresses_of_moved_pages_redirect_to_the_new_ones():
    for old,target in moved.items():
        page,_,anchor = target.partition('#')
        assert f'url={"../"*old.count("/")}{target}"' in (site/f'{old}.html').read_text(encoding='utf-8')
        assert anchor in ids(page)

def test_an_unknown_address_shows_links_to_pages_that_exist():
    "The links are absolute, because the address may be in any folder"
    text = (site/'404.html').read_text(encoding='utf-8')
    links = [o.removeprefix(docs_url()) for o in re.findall('href="([^"]+)"', text)]
    assert len(links)>2 and all(o.startswith('/') and (site/(o[1:] or 'index.html')).exists() for o in links)

def sidebar(page):
    "Return the pages to which the sidebar of `page` links, in order"
    text = read(page).partition('<div class="sidebar-tree">')[2].partition('</div>')[0]
    found = re.findall(r'<li class="toctree-l\d[^"]*"><a class="[^"]*" href="([^"]+)"', text)
    return [urljoin(page, page.rpartition('/')[2] if o=='#' else o) for o in found]

def test_users_and_contributors_have_menus_of_their_own():
    """The users' menu is in the order of `order` in docs/build.py

    The contributors' menu has every module.
    """
    # in the menu, these pages stand below the page API
    api = [f'{o}.html' for o in public_modules]
    listed = [o for o in sidebar('index.html') if o not in api]
    assert listed==[f'{o}.html' for o in order if not o.startswith('contribute/')]
    assert {f'{o}.html' for o in public_modules}<=set(sidebar('index.html'))
    mods = {page_of(o.relative_to(root/'nbs')) for o in (root/'nbs').rglob('[0-9]*_*.ipynb')}
    inner = {f'modules/{o}.html' if o in public_modules else f'{o}.html' for o in mods}
    own = sidebar('contribute/index.html')
    assert inner<=set(own) and {f'{o}.html' for o in order if o.startswith('contribute/')}<=set(own)
    assert sorted(user_pages+own[1:])==sorted(set(pages)-{'search.html'})

def test_the_errors_at_the_end_of_a_docstring_are_split_off():
    doc = 'Refuse it\n\nMore: about it\n\nTypeError: it is\n  no number\ntorch.OutOfMemoryError: too large\n'
    text,errors = split_errors(doc)
    assert text=='Refuse it\n\nMore: about it'
    assert errors==[['TypeError','it is no number'], ['torch.OutOfMemoryError','too large']]
    assert split_errors('ValueError: is only the first line')==('ValueError: is only the first line', [])

def test_the_pages_to_which_modules_link_exist():
    for fn in (root/'fastaccum').rglob('*.py'):
        text = fn.read_text(encoding='utf-8')
        for o in re.findall(r'https://fastaccum.github.io/fastaccum/(\S+?)["\s]', text): assert (site/o).is_file(), o

def test_every_public_name_has_an_entry():
    for fn in (root/'fastaccum').rglob('[a-z]*.py'):
        mod = import_module('.'.join(fn.relative_to(root).with_suffix('').parts))
        own = [nm for nm in getattr(mod, '__all__', []) if fn.stem!='all']
        # `__all__` may name a method that nbdev's `patch` has added to a class
        documented = {nm.split('.')[-1] for nm in names}
        assert [nm for nm in own if nm not in documented]==[], fn.name

@pytest.mark.parametrize('name', names)
def test_each_entry_is_complete(name):
    "An entry has an anchor, a link to the lines that define the name, and a table of errors"
    full,page = entries[name]
    page = f'{page}.html'
    assert {full,name.lower()} <= ids(page)
    sign,_,entry = read(page).partition(f'id="{full}"')[2].partition('</dl>')[0].partition('</dt>')
    pinned,path,line = re.search(r'href="[^"]+/blob/([^/"]+)/([^#"]+)(?:#L([^"]+))?"', sign).groups()
    # a link to the branch main would soon show other lines
    assert pinned!='main' or not (root/'.git').exists()
    text = (root/path).read_text(encoding='utf-8').split('\n')
    short = name.split('.')[-1]
    if line: assert re.search(fr'(def|class) {short}\b', '\n'.join(text[int(line.split('-')[0])-1:][:3]))
    else: assert re.search(fr'^{short}\b', '\n'.join(text), re.M)
    o = resolve(import_module(full.removesuffix(f'.{name}')), name)
    if not (inspect.isclass(o) or inspect.isfunction(o)): return
    docs = [o.__doc__] + ([o.__init__.__doc__] if inspect.isclass(o) and '__init__' in vars(o) else [])
    errors = [e for doc in filter(None, docs) for e in split_errors(inspect.cleandoc(doc))[1]]
    has_warning = any(e.endswith('Warning') for e,_ in errors)
    assert ('<p>Errors</p>' in entry)==(bool(errors) and not has_warning)
    assert ('<p>Errors and warnings</p>' in entry)==has_warning
    for o,_ in errors: assert f'>{o}</span>' in entry and f'{o}:' not in entry

guides = [o for o in order if o.startswith(('get_started','guides/'))]

@pytest.mark.parametrize('page', pages)
def test_literals_in_the_text_can_be_pasted_into_code(page):
    "Python does not read typographic quotes"
    text = re.sub('<.*?>', '', read(page).partition('<article')[2].partition('</article>')[0])
    assert not re.findall('‘.{,20}', text)

@pytest.mark.parametrize('page', public_modules)
def test_an_api_page_begins_with_the_import_to_type(page):
    code = re.search(r'<pre>(.*?)</pre>', read(f'{page}.html').partition('<article')[2], re.S)[1]
    assert re.search(r'(?:from|import) .*fastaccum', re.sub('<.*?>', '', code).partition('\n\n')[0])

@pytest.mark.parametrize('page', guides)
def test_guides_open_in_colab(page):
    colab = f'https://colab.research.google.com/github/fastaccum/fastaccum/blob/main/nbs/{page}.ipynb'
    assert colab in link_targets(f'{page}.html')
    # the site hides the cell that installs fastaccum in Colab
    assert 'google.colab' not in read(f'{page}.html')

def test_the_site_hides_cells_of_nbdev_but_no_import():
    "Readers need the imports to run the cells below the imports"
    assert hides({'hide':''}, '#| hide\nimport nbdev; nbdev.nbdev_export()')
    assert hides({'hide':''}, '#| hide\nfrom nbdev.showdoc import *') and hides({'default_exp':'x'}, '')
    assert hides({'hide':''}, 'assert 1') and hides({'hide':''}, '%matplotlib inline')
    assert not hides({'hide':''}, '#| hide\nfrom nbdev.showdoc import *\nimport torch') and not hides({}, 'assert 1')
    text = read('modules/accumulation.html')
    assert 'Show the imports' in text and 'showdoc' not in text and 'nbdev_export' not in text

def test_formulas_are_rendered():
    text = read('modules/noise_scale.html')
    assert '<math ' in text and '<mfrac>' in text and 'Σ</mi>' in text
    for page in pages:
        text = read(page).partition('<article')[2].partition('</article>')[0]
        text = re.sub(r'<(pre|code)\b.*?</\1>', '', text, flags=re.S)   # code may contain a dollar sign
        assert '$' not in text, page

def test_pages_have_descriptions_and_a_link_to_the_repository():
    "Search engines and link previews show the picture and the description, which each page has its own"
    descriptions,preview = [],(root/'images/same-run.png').read_bytes()
    for page in {*pages}-{'search.html'}:
        text = read(page)
        descriptions.append(re.search(r'<meta name="description" content="([^"`]{10,})">', text)[1])
        picture = re.search(r'<meta property="og:image" content="https://fastaccum.github.io/fastaccum/([^"]+)">', text)
        assert (site/picture[1]).read_bytes()==preview, page
        assert 'class="repository" href="https://github.com/fastaccum/fastaccum"' in text, page
    assert len(descriptions)>60 and len(set(descriptions))==len(descriptions)

def test_every_page_has_a_copy_in_markdown():
    "The copy has the title of the page, and its links lead to pages and pictures that exist"
    fns = {site/f'{page}.md': page for page in pages if page!='search.html'}
    assert set(site.rglob('*.html.md'))==set(fns)
    for fn,page in fns.items():
        text = fn.read_text(encoding='utf-8')
        title = re.search(r'<h1>(.*?)<a class="headerlink"', read(page))[1]
        title = unescape(re.sub('<.*?>', '', title)).replace('’', "'")
        assert text.startswith(f'# {title}\n'), fn
        text = re.sub(r'^```.*?^```', '', text, flags=re.M|re.S)
        assert not re.search(r'\]\((?!http)[^)]*\.ipynb|^\{\.|^:::|^:module:', text, re.M), fn
        named = re.findall(r'\]\(https://fastaccum\.github\.io/fastaccum/?([^)#\s]*)', text)
        assert [o for o in named if not (site/(o or 'index.html')).is_file()]==[], fn

@pytest.mark.parametrize('name', names)
def test_a_copy_in_markdown_has_the_entries_of_the_page(name):
    full,page = entries[name]
    text = (site/f'{page}.html.md').read_text(encoding='utf-8')
    o = resolve(import_module(full.removesuffix(f'.{name}')), name)
    head = re.search(fr'^### `{re.escape(name)}\b.*`\n\n(.*)', text, re.M)
    assert head
    if (inspect.isclass(o) or inspect.isfunction(o)) and o.__doc__: assert head[1]==inspect.getdoc(o).splitlines()[0]

@pytest.mark.parametrize('page', guides)
def test_the_code_of_a_guide_in_markdown_is_complete(page):
    "It includes the code that the site folds, except the code of tables"
    text = (site/f'{page}.html.md').read_text(encoding='utf-8')
    nb, = [o for o in nbglob(root/'nbs', as_path=True) if page_of(o.relative_to(root/'nbs'))==page]
    for c in read_nb(nb).cells:
        if c.cell_type!='code' or re.search(r'^#\| *(hide|echo: *false)', c.source, re.M): continue
        if any('text/markdown' in o.get('data', {}) for o in c.outputs): continue
        source = re.sub(r'^#\|.*\n?', '', c.source, flags=re.M).strip('\n')
        assert f'```python\n{source}' in text

def test_llms_txt_lists_every_page():
    "llmstxt.org asks for a title, a summary, and sections of links; the section Optional is last"
    text = (site/'llms.txt').read_text(encoding='utf-8')
    assert re.match(r'# fastaccum\n\n> \S.{100,}\n\n', text)
    base = re.escape('https://fastaccum.github.io/fastaccum/')
    sections = text.split('\n## ')[1:]
    listed = {o.partition('\n')[0]: re.findall(fr'^- \[.+\]\({base}(.+)\.md\): \S.+$', o, re.M) for o in sections}
    in_order = [o for names in listed.values() for o in names]
    assert sorted(in_order)==sorted({*pages}-{'search.html'})
    assert [*listed][-1]=='Optional' and not {*listed['Optional']}&{*user_pages}
    lines = [o for section in sections for o in section.splitlines()[1:] if o]
    assert len(lines)==len(in_order)   # each line of a section is a link of this form

def test_the_skill_for_assistants_is_on_the_site():
    text = (site/'SKILL.md').read_text(encoding='utf-8')
    assert text==(root/'skills/fastaccum/SKILL.md').read_text(encoding='utf-8')
    assert '/fastaccum/SKILL.md)' in (site/'llms.txt').read_text(encoding='utf-8')
    named = re.findall(r'https://fastaccum\.github\.io/fastaccum/([^)#\s]+)', text)
    assert named and [o for o in named if not (site/o).is_file()]==[]

# Tests in a browser

url = 'http://localhost/'   # the address at which `serve` answers with files of the site

@pytest.fixture(scope='session')
def browser_tab():
    "Open a browser tab for all tests; its list `wrong` collects errors and requests to other servers"
    if not chromium: pytest.skip('THE SITE IS NOT TESTED IN A BROWSER: install Chromium (apt-get install chromium)')
    wrong = []
    def serve(route):
        to = route.request.url
        path = site/(unquote(urlsplit(to).path)[1:] or 'index.html')
        if to.startswith(url) and path.is_file(): return route.fulfill(path=path)
        wrong.append(f'not of the site: {to}')
        route.abort()
    with sync_playwright() as p:
        args = ['--no-sandbox', '--disable-gpu', '--disable-background-networking']
        context = p.chromium.launch(executable_path=chromium, args=args).new_context()
        context.route('**', serve)
        page = context.new_page()
        page.set_default_timeout(120_000)   # ms, for busy machines
        page.on('console', lambda o: o.type=='error' and wrong.append(f'console: {o.text}'))
        page.on('pageerror', lambda o: wrong.append(f'error: {o}'))
        page.wrong = wrong
        yield page

@pytest.fixture
def tab(browser_tab):
    "Return the browser tab, without the errors of earlier tests"
    browser_tab.wrong.clear()
    return browser_tab

# Run on a page: return its faults (elements that are cut, scroll or are hard to read), and how light its
# background is
faults_of_page = """() => {
    const wrong = [], width = document.documentElement.clientWidth, all = (s) => [...document.querySelectorAll(s)];
    const seen = (e) => e.getClientRects().length > 0;
    const scrolls = (e) => { for (; e && e.tagName != 'BODY'; e = e.parentElement)
        if (['auto','scroll'].includes(getComputedStyle(e).overflowX)) return e; return null; };
    const whole = document.documentElement.scrollWidth;
    if (whole > width) wrong.push(`scrolls sideways: ${whole} > ${width}`);
    for (const e of all('article img')) {
        if (!e.alt) wrong.push(`no alt text: ${e.src}`);
        if (!e.naturalWidth) wrong.push(`no picture: ${e.src}`);
        if (seen(e) && e.getBoundingClientRect().right > width+1) wrong.push(`picture cut: ${e.src}`);
    }
    for (const e of all('article table').filter(seen)) {
        const box = scrolls(e);
        if ((box || e).getBoundingClientRect().right > width+1) wrong.push(`table cut: ${e.textContent.slice(0, 40)}`);
        const mayScroll = location.pathname.includes('/contribute/');
        if (!e.closest('details') && !mayScroll && box && box.scrollWidth > box.clientWidth+1)
            wrong.push(`table scrolls: ${e.textContent.slice(0, 40)}`);
    }
    const link = document.querySelector('a.repository'), title = document.querySelector('article h1');
    if (width < 500 && link && title && link.getBoundingClientRect().bottom >
        title.getBoundingClientRect().top + parseFloat(getComputedStyle(title).paddingTop))
        wrong.push('the link to GitHub touches the title');
    const lone = (e) => e && !document.querySelector('article dl.py') &&   // on pages of modules, many cells are folded
        e.matches('div.cell:has(> details.hide):not(:has(> .cell_output))');
    for (const e of all('article div.cell'))
        if (lone(e) && lone(e.nextElementSibling)) wrong.push(`folded twice: ${e.textContent.trim().slice(0, 40)}`);
    for (const e of all('article pre').filter(seen)) {
        const style = getComputedStyle(e);
        if (width < 500 && e.closest('.columns') && style.whiteSpace != 'pre')
            wrong.push(`columns wrap: ${e.textContent.slice(0, 40)}`);
        if (e.scrollWidth <= e.clientWidth+1) continue;
        if (width > 500 && !e.closest('.cell_output')) wrong.push(`code scrolls: ${e.textContent.slice(0, 40)}`);
        if (!['auto','scroll'].includes(style.overflowX)) wrong.push(`cut: ${e.textContent.slice(0, 40)}`);
    }
    for (const e of all('article p'))
        if (/^\\||\\]\\(|^#+ |```/.test(e.textContent)) wrong.push(`Markdown left over: ${e.textContent.slice(0, 40)}`);
    const linear = (o) => (o /= 255) <= .04045 ? o/12.92 : ((o+.055)/1.055)**2.4;
    const light = (c) => { const v = c.match(/[\\d.]+/g).map(Number).slice(0, 3).map(linear);
        return .2126*v[0]+.7152*v[1]+.0722*v[2]; };
    const ground = light(getComputedStyle(document.body).backgroundColor);
    for (const e of all('article p, article li, article td, article h1, .sidebar-tree a').filter(seen)) {
        const [a,b] = [light(getComputedStyle(e).color), ground].sort((x,y) => y-x);
        if ((a+.05)/(b+.05) < 4.5) { wrong.push(`hard to read: ${e.textContent.slice(0, 40)}`); break; }
    }
    return [wrong, ground];
}"""

# Run on a page: return the bottom of an element, in pixels from the top of the screen
bottom_of = "(s) => { const e = document.querySelector(s); return e ? e.getBoundingClientRect().bottom : Infinity; }"

@pytest.mark.parametrize('page', pages)
def test_each_page_is_readable_on_wide_and_narrow_screens(tab, page):
    "The page is loaded once, and its folded code is unfolded to be checked as well"
    shots = os.environ.get('SHOTS')
    tab.set_viewport_size(dict(width=1440, height=900))
    tab.goto(url+page, wait_until='load')
    # the table fits on one screen
    if page=='reference/cheat_sheet.html': assert tab.evaluate(bottom_of, 'section#terms table')<=900
    # the first screen shows the signature and most of the parameters
    if page.removesuffix('.html') in public_modules:
        assert tab.evaluate(bottom_of, 'article dl.py > dt')<500
        rows = ' tr' if page in ('accumulation.html','accum_find.html','wandb.html') else ''
        assert tab.evaluate(bottom_of, f'article dl.py table{rows}')<=900
    # layouts differ by width and colors by scheme, so two of the four combinations show all of them
    for device,width,height,scheme in (('wide', 1440, 900, 'light'), ('narrow', 390, 844, 'dark')):
        tab.set_viewport_size(dict(width=width, height=height))
        if page=='accumulation.html': assert tab.locator('[data-label=Default]').count()
        tab.emulate_media(color_scheme=scheme)
        if shots: tab.screenshot(path=f'{shots}/{page.replace("/", "-")}-{device}-{scheme}.png', full_page=True)
        tab.evaluate("document.querySelectorAll('article details').forEach(o => o.open = true)")
        wrong,ground = tab.evaluate(faults_of_page)
        assert wrong+tab.wrong==[], (device,scheme)
        assert (ground<0.2)==(scheme=='dark')

@pytest.mark.parametrize('page', ['index','guides/images','about/switching','reference/faq','accumulation'])
def test_pages_do_not_scroll_sideways_on_tablets_and_small_laptops(tab, page):
    "Just above the widths at which the menu and the list of headings appear, the text has the least room"
    tab.goto(f'{url}{page}.html')
    for width in (1008,1024,1312,1366):
        tab.set_viewport_size(dict(width=width, height=768))
        wrong,_ = tab.evaluate(faults_of_page)
        assert [o for o in wrong if not o.startswith('table scrolls')]==[], width   # a wide table may

def test_old_code_stands_beside_the_new_code_or_above_it_where_there_is_no_room(tab):
    "The page shows how to switch from other libraries. No line of code wraps beside other code"
    pairs = """() => {
        const corner = (e) => [e.getBoundingClientRect().left, e.getBoundingClientRect().top];
        const old = [...document.querySelectorAll('article div.highlight-python:has(+ div.cell)')];
        return old.map((e) => [corner(e), corner(e.nextElementSibling)]);
    }"""
    label_is_above = """() => [...document.querySelectorAll('article div.highlight-python:has(+ div.cell)')]
        .every((e) => e.firstElementChild.getBoundingClientRect().width > e.getBoundingClientRect().width-2)"""
    wrapped = """() => [...document.querySelectorAll('#switch-to-fastaccum pre')].filter((e) => {
        const lines = e.textContent.trimEnd().split('\\n').length, style = getComputedStyle(e);
        return e.clientHeight > (lines+.5)*parseFloat(style.lineHeight) + 2*parseFloat(style.paddingTop);
    }).map((e) => e.textContent.slice(0, 40))"""
    for width,beside in ((1440,True), (1000,False), (390,False)):
        tab.set_viewport_size(dict(width=width, height=900))
        tab.goto(f'{url}about/switching.html')
        assert tab.evaluate(label_is_above), width
        found = tab.evaluate(pairs)
        assert len(found)==6
        if beside: assert tab.evaluate(wrapped)==[]
        for (left,top),(left_of_new,top_of_new) in found:
            if beside: assert top==top_of_new and left_of_new>left+300
            else: assert left==left_of_new and top_of_new>top+100

def test_columns_of_a_table_that_is_read_row_by_row_on_a_phone_have_different_heads(tab):
    "On a phone, the head of its column stands before each cell"
    tab.set_viewport_size(dict(width=390, height=844))
    for page in user_pages:
        tab.goto(url+page)
        heads = tab.evaluate("""() => [...document.querySelectorAll('article table.stacked')].map((table) =>
            [...table.querySelectorAll('thead tr:first-child > *')].map((head) => head.textContent.trim()))""")
        assert [o for o in heads if len(set(o))<len(o)]==[], page

# Run on the page of the search: return, for each query, the addresses of its results
search = """(words) => Object.fromEntries(words.map((o) => [window.asked = o,
    Search._performSearch(...Search._parseQuery(o)).map(([page,,anchor]) => page + '.html' + anchor)]))"""

@pytest.fixture
def search_site(tab):
    "Return a function that searches the site for each of a list of queries; it returns {query: results}"
    tab.goto(f'{url}search.html?q=GradientAccumulation')   # the first search loads the index
    tab.wait_for_selector('#search-results a[href$="#fastaccum.accumulation.GradientAccumulation"]',
        state='attached')
    yield lambda words: tab.evaluate(search, list(words))
    assert not tab.wrong

def test_search_finds_the_names_that_users_import_and_no_internal_page(search_site):
    results = search_site(names)
    public_names = {nm for nm,(_,page) in entries.items() if f'{page}.html' in user_pages}
    not_found = [nm for nm in public_names if not any(o.endswith(f'#{names[nm]}') for o in results[nm])]
    assert public_names and not_found==[]
    assert not [o for nm in names for o in results[nm] if o.partition('#')[0] not in user_pages]

def test_a_search_shows_the_heading_and_the_text_of_the_section_that_it_leads_to(tab):
    "The anchor may be hidden below the heading, and a typo is corrected"
    for query,title,words,status in [
            ('samples left out', 'Messages > Incomplete steps', 'samples are left out', 'results'),
            ('no lengths', 'Messages > Token budget', 'pad_id', 'results'),
            ('batchnrom', 'BatchNorm', 'BatchNorm', 'results for “batchnorm”')]:
        tab.goto(f'{url}search.html?q={query}')
        tab.wait_for_function("document.querySelector('.search-summary').innerText.includes('result')")
        tab.wait_for_selector('#search-results li p.context')
        titles = tab.locator('#search-results li > a').all_inner_texts()
        assert title in titles
        item = tab.locator('#search-results li').nth(titles.index(title))
        item.locator('p.context').wait_for()
        assert words in item.locator('p.context').inner_text(), query
        assert status in tab.locator('.search-summary').inner_text()

def test_a_result_leads_to_the_section_with_the_words_and_shows_a_sentence_of_it(tab):
    "A result stays at the top of its page if the page as a whole answers. Prose is shown rather than code"
    top,install = 'Get started > Install and try','#install-and-try'
    for query,place,title,to,words in [
            ('install', 0, top, f'get_started.html{install}', 'Install fastaccum'),
            ('install', 1, 'fastaccum > Install and try', f'index.html{install}', 'or newer'),
            ('batchnorm frozen', 0, 'BatchNorm > Freeze', 'guides/batchnorm.html#freeze', 'frozen'),
            ('token loss', 0, 'Text > Padded sentences', 'guides/text.html#padded-sentences', 'tokens'),
            ('multi gpu', 0, 'Several GPUs', 'guides/several_gpus.html', 'all GPUs'),
            ('fp16', 0, 'Mixed precision', 'guides/mixed_precision.html', 'to_fp16()'),
            ('batchnorm resnet', 0, 'BatchNorm', 'guides/batchnorm.html', 'BatchNorm'),
            ('memory adam', 1, 'Images > Accuracy, memory and time', 'guides/images.html#accuracy-memory-and-time',
                'Memory includes')]:
        tab.goto(f'{url}search.html?q={query}')
        tab.wait_for_function("document.querySelector('.search-summary').innerText.includes('result')")
        item = tab.locator('#search-results li').nth(place)
        item.locator('p.context').wait_for()
        link = item.locator('a').first
        assert (link.inner_text(), link.get_attribute('href'))==(title, to), query
        assert words in item.locator('p.context').inner_text(), query
        assert not re.search('^(import|from|pip) ', item.locator('p.context').inner_text()), query
        if '#' in to: assert to.partition('#')[2] in ids(to.partition('#')[0])
    assert tab.wrong==[]

def test_the_marks_of_a_search_can_be_hidden_where_the_menu_does_not_cover_the_page(tab):
    for width,is_shown in ((1440,True), (390,False)):
        tab.set_viewport_size(dict(width=width, height=844))
        tab.goto(f'{url}search.html?q=clip gradients')
        tab.locator('#search-results li a').first.click()
        tab.wait_for_selector('span.highlighted')
        hide = tab.locator('.highlight-link')
        assert hide.is_visible()==is_shown
        if not is_shown: continue
        hide.locator('a').click()
        tab.wait_for_selector('span.highlighted', state='detached')
        assert not hide.count()

# searches.json has, by page, the queries for which this page must be the first result
searches = json.loads((root/'tests/searches.json').read_text(encoding='utf-8'))
answers = {q:page for page,qs in searches.items() for q in qs}

# Queries that must find a section: keywords that pages give to their sections, and words of messages for
# their entries
keywords = json.loads(re.search('^const keywords = (.*);$', read('_static/language_data.js'), re.M)[1])
message_words = {'GradientAccumulation has no argument microbatches':'unknown-argument',
    'loss not a mean':'loss-not-a-mean', '2 callbacks accumulate':'two-callbacks',
    'memory ran out even with a single sample':'out-of-memory', 'memory ran out with a micro-batch':'memory-ran-out',
    'ValueError: Exception occured in `GradientAccumulation` when calling event `before_fit`: '
    'epoch 0 has 50 samples, too few for a step of 64':'no-step',
    '`micro_batch_size=32` is larger than the 16 samples in a batch of the training DataLoader':'micro-batch-size',
    'no segments were found in this Sequential':'segments'}
sections = {q:f'{page}.html#{at}' for page,qs in keywords.items() for q,at in qs if at and 'messages' not in page} | {
    q:f'reference/messages.html#{o}' for q,o in message_words.items()}

def test_queries_lead_to_the_page_or_section_that_answers(search_site):
    results = search_site(answers)
    first = {q:(results[q] or ['nothing'])[-1].partition('.html')[0] for q in answers}
    assert {q:o for q,o in first.items() if o!=answers[q]}=={}
    # a query matches the beginning of a word, not its middle
    assert not search_site(['ormalis'])['ormalis']
    found = search_site(sections)
    assert {q:found[q][-1:] for q,o in sections.items() if found[q][-1:]!=[o]}=={}
    for o in sections.values(): assert o.partition('#')[2] in ids(o.partition('#')[0])
    # the search never shows pages for contributors
    inner = ('modules/','contribute/',*(f'{o}/' for o in rooms))
    assert not [o for q in answers for o in results[q] if o.startswith(inner)]
