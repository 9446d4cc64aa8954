"""Words of which the things in the wide-search library are named: short, ordinary, each one easy to copy."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _words(
    """
    Red Green Blue Black White Golden Silver Grey Brown Pink Amber Copper Iron Crystal Marble Velvet High Low Long
    Short Wide Deep Old New Young Late Early Great Small Little Grand Fair Good Fine True Free Bright Dark Clear
    Calm Wild Warm Cold Cool Dry Soft Hard Sharp Round Flat Broad Narrow Strong Quiet Proud Noble Royal Holy Bold
    Brave Swift Quick Slow Still Open Hidden Lost Far Near Upper Lower Middle Inner Outer First Second Third Last
    Summer Winter Spring Autumn Morning Evening Midnight Sunny Rainy Windy Stormy Cloudy Misty Frozen Burning Sandy
    Salty Glass Wooden Stone Silent Singing Dancing Sleeping Running Flying Falling Rising Broken Painted Empty
    Lonely Happy Gentle Honest Clever Wise Ancient Modern Simple Secret Single Double Triple
    """
)
SECOND = _words(
    """
    Sun Moon Star Snow Rain Wind Storm Cloud Mist Frost Ice Fire Sand Salt Clay Oak Pine Elm Ash Apple Cherry Rose
    Lily Fox Wolf Bear Deer Lion Eagle Hawk Swan Raven Owl Horse Bull Lamb Fish River Lake Sea Ocean Bay Hill
    Mountain Valley Field Forest Wood Garden Meadow Island Harbor Gate Tower Castle Church Market Mill Well Road
    Street Corner Point Cross Crown King Queen Prince Knight Hunter Falcon Dragon Tiger Otter Badger Beaver Rabbit
    Turtle Spider Bee Wing Feather Shell Pearl Coral Anchor Sail Wheel Arrow Shield Sword Lance Hammer Anvil Bell
    Drum Harp Flute Song Dance Dream Shadow Light Flame Ember Spark Echo Thunder Breeze Wave Tide Stream Brook
    Spring Canyon Cliff Ridge Summit Cave Desert Prairie Orchard
    """
)
GIVEN = _words(
    """
    Anna Mary John Peter Paul James Mark Luke David Adam Eva Sara Rosa Clara Emma Laura Julia Maria Helen Alice Jane
    Kate Lucy Nora Ruth Ada Ella Ida Olga Vera Max Leo Tom Tim Ben Sam Dan Jack Harry Henry Oscar Victor Simon Felix
    Hugo Ivan Karl Otto Emil Erik Arthur Martin Robert Edward George Frank Walter Louis Philip Daniel Rachel Hannah
    Sophie Irene Agnes Martha Judith Esther Flora Grace Hope Iris Joan Lena Lisa Marta Mona Nina Paula Petra Rita
    Stella Sylvia Tessa Ursula Wanda Albert Bruno Conrad Dennis Ernest Fred Gustav Herman Isaac Jonas
    """
)
SURNAMES = _words(
    """
    Miller Baker Smith Carter Fisher Mason Cooper Turner Walker Parker Taylor Porter Archer Barber Butler Chandler
    Clark Cook Dyer Fuller Gardner Glover Potter Sawyer Shepherd Slater Tanner Weaver Wright Abbott Bishop Dean Duke
    Marsh Moore Woods Banks Brooks Fields Forest Hills Lake Rivers Stone Cliff Dale Glen Heath Lane March May Winter
    Summers Frost Snow Day Knight King Noble Wise Young Long Little Strong Sharp Swift Bright Good Goodman Newman
    Freeman Chapman Hartman Pearson Benson Carson Dawson Edison Ferguson Gibson Hudson Jackson Johnson Lawson Nelson
    Olson Peterson Richardson Robinson Simpson Thompson Watson Wilson Bell Bird Crane Drake Finch Robin Swan
    """
)
MATERIALS = _words(
    """
    granite marble limestone sandstone brick concrete steel iron copper bronze oak pine cedar bamboo glass clay
    slate basalt rope ash
    """
)
TRADES = _words(
    """
    fishing weaving mining baking brewing printing farming milling tanning pottery glassmaking shipbuilding
    carpentry masonry beekeeping forestry trading tailoring painting gardening smithing clockmaking papermaking
    teaching
    """
)
