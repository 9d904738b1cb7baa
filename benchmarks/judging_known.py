r"""Answer pairs from the tests of math-verify (huggingface/Math-Verify, MIT licence, tests/test_all.py at cf14bc47 and
tests/test_yujianll.py at 056ad625): which answer its authors take for which. The installed package has no tests.

Long model outputs are cut to the part that gives the answer; pairs that only test options of its own (rounding to two
places, no line breaks in inline mathematics) are left out. A bare answer stands in a box.

DISAGREE holds those where docs/judges.md says otherwise on purpose, with the reason; they are not counted.
"""

from __future__ import annotations

SAME = [
    ("-5", "-5"), ("7425000", "7,425,000"), ("1000", "1 000"), ("1000", "1000.0"), ("1000.0", "1,000.0"), ("0.4", ".4"),
    ("1000.99", "1,000.99"), ("1000.99", "$1,000.99"), ("1000.99", "1,000.99$"), ("10/9", "\\frac{10}{9}"),
    ("-10/9", "-\\frac{10}{9}"), ("[0,1)", "[0,1)"), ("10", "(9+1)"), ("1/3", "\\frac13"), ("1", "\\frac3{3}"),
    ("\\sqrt{3}", "\\sqrt3"), ("1/3", "\\cfrac{1}{3}"), ("1/3", "\\dfrac{1}{3}"), ("1/3", "\\tfrac{1}{3}"),
    ("1/3", "\\left( \\frac{1}{3} \\right)"), ("1/3", "\\frac{1}{3} \\text{meters}"), ("1/3", "k = \\frac{1}{3}"),
    ("1/3", "\\frac{1}{3} \\textbf{meters}"), ("28\\%", "28 percent"), ("28\\%", "28 pct"), ("28\\%", "28 %"),
    ("28\\%", "28 percentage"), ("28\\%", "28"), ("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("90^\\circ", "90^\\circ"),
    ("3\\sqrt{13}", "3\\sqrt{13}"),
    ("15\\mbox{ cm}^2", "15\\mbox{ cm}^2"),
    ("-2,1", "-2,1"),
    ("204_5", "204_5"), ("(6,31,-1)", "(6,31,-1)"), ("1 \\pm \\sqrt{19}", "1 \\pm \\sqrt{19}"),
    ("\\{1\\pm\\sqrt{5},-2\\}", "\\{1\\pm\\sqrt{5},-2\\}"), ("f(2) < f(1) < f(4)", "f(2) < f(1) < f(4)"),
    ("2 \\sin b \\cos a", "2 \\sin b \\cos a"), ("\\frac{\\pi r}{h+r}", "\\frac{\\pi r}{h+r}"),
    ("$125$ miles", "125\\textnormal{ miles}"), ("\\sqrt{2}+\\sqrt{5}", "\\sqrt 2+\\sqrt 5"),
    ("[-1, -\\frac{1}{2}) \\cup (-\\frac{1}{2}, 0)", "[-1, -\\tfrac12) \\cup (-\\tfrac12, 0)"),
    ("\\frac{9}{4}\\pi", "\\frac94\\pi"), ("\\{-1\\} \\cup [0,7)", "\\{-1\\} \\cup [0,7)"), ("x >= 5", "x \\geq 5"),
    ("x < 3", "x \\lt 3"), ("x \\leq 2", "x <= 2"), ("x > 5", "x \\gt 5"), ("x != 3", "x \\neq 3"),
    ("x \\neq 5", "x != 5"), ("x \\leq 5", "5 \\geq x"), ("x \\geq 5", "5 \\leq x"), ("11", "x=11"),
    ("11", "x\\approx11"), ("x < 1", "-x > -1"), ("x <= 1", "-x >= -1"), ("k=1", "1"), ("1", "k=1"),
    ("2x+4y-3=0", "y=-\\frac{1}{2}x+\\frac{3}{4}"), ("x^2/4 + y^2/3 = 1", "x^2/16 + y^2/12 = 1/4"),
    ("\\begin{pmatrix}1 & 0 \\\\ 0 & 1\\end{pmatrix}", "\\begin{pmatrix}1 & 0 \\\\ 0 & 1\\end{pmatrix}"),
    ("\\begin{bmatrix}0 & 0 \\\\0 & 0\\end{bmatrix}", "\\begin{pmatrix}0 & 0 \\\\0 & 0\\end{pmatrix}"),
    ("\\begin{pmatrix}1 & 2 \\\\3 & 4\\end{pmatrix}", "\\left[\\begin{array}{cc}1 & 2 \\\\3 & 4\\end{array}\\right]"),
    ("\\frac{1}{12}", "0.0833333333333333"), ("(1,\\frac{9}{2})", "(1,4.5)"),
    ("\\frac{x+2}{7}", "\\frac{x}{7}+\\frac{2}{7}"), ("\\tan^2(y)+1", "\\sec^2(y)"),
    ("34x+45y-20z+100=0", "-34x-45y+20z-100=0"), 
    ("16386.20", "\\$16,\\!386.20"), ("12000023", "12,000,023"), ("14916", "14{,}916"), ("$14 {, }916$", "14{,}916"),
    ("\\left(\\frac{1}{5},\\frac{1}{6}\\right)", "\\left( \\frac{1}{5}, \\frac{1}{6} \\right)"),
    ("\\frac{5\\sqrt{42}}{27}", "\\frac{10\\sqrt{10.5}}{27}"), ("20", "20 \\%"), ("[-2, 7]", "x \\in [-2,7]"),
    ("16386.17", "\\$16386.17"), ("x-2y+z-1=0", "x-2y+z-1=0"), ("[-4,0]", "[-4, 0]"), ("(-6, 10)", "x \\in (-6, 10)"),
    ("\\text{C}", "\\text{(C)}"), ("11111111100", "11,\\! 111,\\! 111,\\! 100"), ("32349", "32,\\! 349"),
    ("(2, 12) \\cup (12, 102)", "x \\in (2,12) \\cup (12,102)"),
    ("\\text{E}", "E"),
    ("-2 \\le x \\le 7", "x \\in [-2,7]"),
    ("x \\in [-2,7]", "-2 \\le x \\le 7"), ("4.123105625617661", "\\sqrt{17}"), ("\\frac{1}{3}", "\\frac{1}{3}."),
    ("\\frac{1}{3}", "\\frac{1}{3},"), ("\\sqrt{2}", "\\sqrt{2}."), ("(1,2)", "(1,2)."), ("5", "5 \\text{ cm}."),
    ("42", "42."), ("n=1, 2, 3", "n=1, 2, 3"), ("D = (0, 1)", "D = (0, 1)"), ("12\\text{ and }13", "12 $ and $13"),
    ("19, 46, and 82", "19, 46, \\text{ and } 82"), ("1 - \\frac{1}{\\mathrm{e}}", "1 - \\frac{1}{\\mathrm{e}}"),
    ("\\pm 2021", "\\{-2021, 2021\\}"), ("12:00", "12:00"), ("40/9", "4 4/9"), ("-40/9", "-4 4/9"), ("71/6", "+11 5/6"),
]  # fmt: skip

DIFFERENT = [
    ("[0,9)", "[0,1)"), ("(0,9)", "[0,9)"), ("1", "-[0,1)"), ("0.28", "28"), ("28/100", "28"), ("28", "28/100"),
    ("\\frac{28}{100}", "28"), ("28*\\frac{1}{100}", "28"), ("x > 5", "x < 5"), ("x \\geq 5", "x \\leq 5"),
    ("7 = 11a+c", "11a+c"), ("x < 1", "x > -1"), ("a +3z = 0", "0"), ("2x + z = 1", "1"), ("a^2 + b = 0", "0"),
    ("\\begin{pmatrix}1 & 2 \\\\ 3 & 4\\end{pmatrix}", "\\begin{pmatrix}1 & 2 \\\\ 3 & 5\\end{pmatrix}"),
    ("(a+5)(b+2)", "(+5)(b+2)"), ("2", "\\frac{1+\\sqrt{5}}{2}"), ("4", "\\frac{34}{16}+\\frac{\\sqrt{1358}}{16}"),
    ("1\\sqrt{19}", "1"), ("x+2n+1", "x+1"), ("[0,1)", "(0, 1)"), ("(\\tfrac{27}{8},\\tfrac{15}{8})", "(0, 0)"),
    ("[-3,2]", "(-\\infty, -3] \\cup [2, \\infty)"), ("(3,1)", "1,3"), ("1112112_3", "1112122_3"), ("32349", "32, 349"),
    ("4", "4\\sqrt{2}"), ("2", "2^{10}."), ("1", "1/3."), ("1, 2, 3", "1, 2, 3, ..."), ("n=2, 3, 4", "n=1, 2, 3"),
    ("D = (0, 1)", "D = (0, 1.5)"), ("19, 46, and 82", "21, 36, and 82"), ("\\pm 2021", "2021"), ("12:00", "1:00"),
    ("1 - \\frac{1}{\\mathrm{e}}", "1 + \\frac{1}{\\mathrm{e}}"), ("4", "4 4/9"), ("4", "4 4/0"), ("12", "11 6/6"),
    ("F_n = \\sum_{k=0}^{n-1} F_k F_{n-k-1}", "F_n = \\sum_{k=0}^{n-2} F_k F_{n-k-2}"), ("73/6", "11 7/6"),
    ("139/90", "11/10 4/9"),
]  # fmt: skip

RESPONSES = [
    ("2/3", "Therefore, the probability that Alice wins the game is 2/3.", True),
    ("9", "Answer \\[ 9 \\]", True), ("9", "Answer $ 9 $", True), ("9", "Answer $$ \n 9 \n $$", True),
    ("1000.99", "the number is not 10 which is 1,000.99\u20ac", True), ("2", "AZYUK2A", False),
    ("1000.99", "so the number is 10 which is 1,000.99m\u00b2", True), ("28\\%", "$\\boxed{28}$ pct", True),
    ("1000.99", "not it's not 10 it's 1,000.99m\u00b2", True), ("34", "Final Answer: The largest $n$ is 34.", True),
    ("2-2p", "If $2-x=p$, then $x=2-p$. Thus $x-p=\\boxed{2-2p}$.", True), ("28\\%", "$28$ %", True),
    ("9", "Then, $129^{34}+96^{38} \\equiv \\boxed{9} \\pmod{11}.$", True),
    ("$\\text{Evelyn}$", "Therefore, $\\boxed{\\text{Evelyn}}$ is our answer.", True),
    ("12", "Therefore, there are 12 distinct arithmetic sequences that meet the three given conditions.", True),
    ("(7,6)", "So, the ordered pair $(x, y)$ that solves the system is $(7, 6)$.", True),
    ("189", "\\boxed{189}\n</think>\nThe area is \\(\\boxed{189}\\) square centimeters.", True),
    ("120", "Final Answer: The volume of $ABCDEFGH$ is 120. I hope it is correct.", True),
    ("100\\%", "Therefore, the minimum error in the measurement of the position increases by 100%.", True),
    ("19", "Final Answer: The maximum number of points that could be in the domain of $f(x)$ is 19.", True),
    ("3", "Final Answer: Jane started growing Sphere 3 hours ago. I hope it is correct.", True),
    ("7.78", "So, Anna pays approximately $7.78 for her fudge. Final Answer: The final answer is 7.78.", True),
    ("1, -2", "the integers are: \\[ \\boxed{-2} \\quad \\text{and} \\quad \\boxed{1}. \\]", True),
    ("1,2", "$\\boxed{1}\\boxed{2}$", True),
    ("40/9", "The answer is 4 4/9.", True),
    ("4", "The answer is 4 4/9.", False),
    ("\\frac{1}{3}", "The answer is $\\frac{1}{3}.$", True),
    ("1/3", "The answer is $1/3.$", True),
    ("1", "The answer is $1/3.$", False),
]  # fmt: skip

DISAGREE = [
    ("11", "x = 5+5+1 = 7 =11", True, "two numbers in one chain of equations contradict each other"),
    ("1/3", "x = 5+5+1 = 1/3 \\approx 11", True, "what stands last is the answer"),
    ("1/3", "x=1/3\\approx1.3", True, "what stands last is the answer"),
    ("1000.99", "1000,99", True, "a comma between numbers may make a list"),
    ("1.22", "1,22", True, "a comma between numbers may make a list"),
    ("13", "\\text{13}", False, "a number in \\text is a number"),
]  # fmt: skip


def known() -> list[tuple[str, str, bool]]:
    """(reference, response, right)."""
    boxes = [(gold, f"\\boxed{{{found}}}", True) for gold, found in SAME]
    boxes += [(gold, f"\\boxed{{{found}}}", False) for gold, found in DIFFERENT]
    return boxes + RESPONSES
