"""Shows an opened page as other readers see it."""

# After this a change of width, of colours or of what is unfolded has had all its effects: what
# watches sizes was told, and what fades is at its end. It is brought there, not awaited: a change
# of colour that nobody can see may never end by itself.
SETTLED = """async () => {
  const frame = () => new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done));
    setTimeout(done, 200);
  });
  for (let k = 0; k < 5; k++) {
    await frame();
    for (const animation of document.getAnimations()) {
      if (animation.effect.getComputedTiming().endTime < Infinity) animation.finish();
    }
  }
}"""


def settle(page):
    """Wait until the last change of an opened page has had all its effects."""
    page.evaluate(SETTLED)


def look(page, width, scheme="light"):
    """Show an opened page at another width and in the colours that its reader's screen asks for."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    settle(page)
