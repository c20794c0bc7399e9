"""Shows an opened page as other readers see it."""

# After this a change of width, of colours or of what is unfolded has had all its effects: what
# watches sizes was told, and nothing fades any more.
SETTLED = """async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const moving = () => document.getAnimations().filter((animation) =>
    animation.playState === "running" && animation.effect.getComputedTiming().endTime < Infinity);
  do {
    await Promise.all(moving().map((animation) => animation.finished.catch(() => null)));
    for (let k = 0; k < 3; k++) await frame();
  } while (moving().length);
}"""


def settle(page):
    """Wait until the last change of an opened page has had all its effects."""
    page.evaluate(SETTLED)


def look(page, width, scheme="light"):
    """Show an opened page at another width and in the colours that its reader's screen asks for."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    settle(page)
