# Headers as Doxygen likes them: the comment that a file begins with is that of its page, and the inline namespace, which
# its parser takes for one of its own, is left out.
1s@^// .*@/// \\file@
1s@^/\* .*@/** \\file@
2,/^#/s@^//@///@
s@::inline v[0-9_]+@@
