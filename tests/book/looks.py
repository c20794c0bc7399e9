"""Shows an opened page as other readers see it."""

# After this a change of width, of colours or of what is unfolded has had all its effects. The theme
# makes stops of boxes that scroll, once 300 ms have gone by since the last change: both clocks are
# the page's own, so on a busy machine they are late together. What fades is brought to its end, not
# awaited: a change of colour that nobody can see may never end by itself.
SETTLED = """async () => {
  const frame = () => new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done));
    setTimeout(done, 200);
  });
  await frame();
  await new Promise((done) => setTimeout(done, 350));
  for (let k = 0; k < 3; k++) {
    for (const animation of document.getAnimations()) {
      if (animation.effect.getComputedTiming().endTime < Infinity) animation.finish();
    }
    await frame();
  }
}"""


def settle(page):
    """Wait until the last change of an opened page has had all its effects."""
    page.evaluate(SETTLED)


def look(page, width, scheme="light"):
    """Show an opened page at another width and in the colours that its reader's screen asks for."""
    size = {"width": width, "height": 900}
    if (page.viewport_size, page.scheme) == (size, scheme):
        return
    page.set_viewport_size(size)
    page.emulate_media(color_scheme=scheme)
    page.scheme = scheme
    settle(page)
